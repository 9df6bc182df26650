"""What may be imported without torch, and when torch comes in."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import minipaged
import minipaged.kv

ROOT = Path(__file__).resolve().parents[2]

WITHOUT_TORCH = """
import sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ImportError(f"{name} is blocked in this test")
sys.meta_path.insert(0, NoTorch())
sys.path.insert(0, SRC)
"""


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    code = f"SRC = {str(Path(minipaged.__file__).parents[1])!r}\n" + code
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)


def test_the_metadata_plane_works_without_torch() -> None:
    result = run_python(
        WITHOUT_TORCH
        + """
import minipaged, minipaged.kv
from minipaged import KVBlockManager
m = KVBlockManager(4, 4, enable_prefix_caching=True)
m.create_sequence(0)
print(m.append_tokens(0, 5), minipaged.__version__)
m.commit_tokens(0, range(5))
m.fork_sequence(0, 1)
m.append_token(1)
print(m.take_block_copies(), m.match_prefix(range(9)))
m.check_invariants()
assert "torch" not in sys.modules
try:
    m.get_seq_lens_tensor([0])
except ImportError as error:
    print(error)
"""
    )
    assert result.stderr == ""
    expected = ["[0, 1, 2, 3, 4] " + minipaged.__version__, "[(1, 2)] 4", "torch is blocked in this test"]
    assert result.stdout.splitlines() == expected


def test_importing_minipaged_imports_nothing_heavy() -> None:
    result = run_python(
        "import sys; sys.path.insert(0, SRC); import minipaged, minipaged.kv\n"
        "print([m for m in ('torch', 'transformers', 'tokenizers', 'jinja2', 'safetensors') if m in sys.modules])"
    )
    assert (result.stderr, result.stdout.strip()) == ("", "[]")


@pytest.mark.parametrize("module", [minipaged, minipaged.kv])
def test_unknown_names_and_listing(module) -> None:
    with pytest.raises(AttributeError, match=f"module '{module.__name__}' has no attribute 'nothing'"):
        _ = module.nothing
    assert set(module.__all__) <= set(dir(module))


def test_lazy_names_are_the_real_ones() -> None:
    assert minipaged.KVBlockManager is minipaged.kv.KVBlockManager
    assert minipaged.SequenceState is minipaged.kv.SequenceState


def test_every_lazy_name_is_public() -> None:
    assert set(minipaged._HOME) | {"__version__"} == set(minipaged.__all__)


def test_version_is_that_of_the_distribution() -> None:
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    assert minipaged.__version__ == version[1]
