"""Tables of tile sizes, and what `minipaged tune` does with its candidates; the benchmark script's rehearsal."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from paged_case import assert_near, make_case

from minipaged.ops import paged_attention_online
from minipaged.ops.triton.kernels import tuning
from minipaged.ops.triton.kernels.tuning import Tile
from minipaged.ops.triton.tune import best, tune

ROOT = Path(__file__).parents[3]


def test_a_table_is_used_and_changes_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case([70, 515])
    key = tuning.tile_key("decode", 16, torch.float32, 4, 2)
    assert key == "decode float32 head_dim=16 block_size=4 group=2"
    monkeypatch.setattr(tuning, "tuned", lambda: {key: Tile(0, 16, 8, 4)})
    assert tuning.decode_tile(16, torch.float32, 4, 2).keys == 16
    assert tuning.decode_tile(16, torch.float32, 8, 2).keys == 64
    assert_near(paged_attention_online(*case.decode_arguments, backend="triton"), case.expected(), 1e-5)


def test_save_load_and_where_tables_live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = {"decode x": Tile(0, 64, 4, 3), "varlen x": Tile(128, 64, 8, 3)}
    path = tmp_path / "deep" / "table.json"
    tuning.save_table(path, tiles, {"gpu": "none"})
    assert tuning.load_table(path) == tiles
    for wrong in ("{", "{}", '{"tiles": {"a": {"rows": 1}}}', '{"tiles": []}'):
        path.write_text(wrong)
        with pytest.raises(ValueError, match=r"table\.json is not a tuning table"):
            tuning.load_table(path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(tuning.TABLE_VARIABLE, raising=False)
    assert tuning.table_path("NVIDIA H200 (x)") == tmp_path / "minipaged" / "tuning" / "nvidia-h200-x.json"
    monkeypatch.setenv(tuning.TABLE_VARIABLE, "/elsewhere.json")
    assert tuning.table_path("NVIDIA H200") == Path("/elsewhere.json")


@pytest.mark.parametrize("kind", ["decode", "varlen"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_candidates_keep_tiles_at_absolute_positions(kind: str, head_dim: int, arch: int) -> None:
    """Tiles must divide a split of 512 positions, and be powers of two."""
    tiles = tuning.candidates(kind, head_dim, torch.bfloat16, arch)
    assert 4 <= len(tiles) == len(set(tiles))
    assert not any((tile.rows, tile.keys, tile.num_warps) in tuning.SPILLING[arch] for tile in tiles)
    assert all(512 % tile.keys == 0 for tile in tiles)


def test_default_tiles_follow_the_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tuning.arch_of(torch.device("cpu")) == 90
    capabilities = {80: (8, 0), 89: (8, 9), 90: (9, 0), 100: (10, 0), 103: (10, 3), 120: (12, 0)}
    for number, capability in capabilities.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        expected = {90: 90, 100: 100, 103: 100}.get(number, 80)
        assert tuning.arch_of(torch.device("cuda", number)) == expected
    for arch, tiles in tuning.SPILLING.items():
        tile = tuning.varlen_tile(128, torch.bfloat16, 16, 2, arch)
        assert (tile.rows, tile.keys, tile.num_warps) not in tiles


def test_tune_takes_the_fastest_right_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are given; a candidate that is wrong, or that cannot run, is out whatever its time."""
    from minipaged.ops.triton import tune as module

    slow, fast, broken, wrong = (Tile(r, k, 4, 2) for r, k in ((16, 32), (32, 16), (32, 64), (32, 32)))
    monkeypatch.setattr(module, "candidates", lambda kind, d, dtype, arch: [slow, fast, broken, wrong])
    monkeypatch.setattr(module, "decode_tile", lambda *a: slow)
    monkeypatch.setattr(module, "varlen_tile", lambda *a: slow)
    run, ran = module._Problem.run, []

    def spy(problem: module._Problem, tile: Tile) -> torch.Tensor:
        ran.append(tile)
        if tile == broken:
            raise RuntimeError("out of resource: shared memory")
        return run(problem, replace(tile)) * (1.5 if tile == wrong else 1.0)

    monkeypatch.setattr(module._Problem, "run", spy)

    def timer(call: object) -> float:
        call()  # type: ignore[operator]
        return {slow: 3.0, fast: 1.0}[ran[-1]]

    small = {"decode": ((2, 1, 40),), "varlen": ((1, 9, 20),)}
    measured = list(
        tune([(2, 1, 16)] * 2, [16], dtype=torch.float32, device=torch.device("cpu"), timer=timer, workloads=small)
    )
    assert len(measured) == 2 * 4
    assert [m.seconds for m in measured[:4]] == [3.0, 1.0, None, None]
    assert measured[2].problem == "RuntimeError: out of resource: shared memory"
    assert str(measured[3].problem).startswith("wrong: error 0.")
    keys = [f"{kind} float32 head_dim=16 block_size=16 group=2" for kind in ("decode", "varlen")]
    assert best(measured) == dict.fromkeys(keys, fast)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to tune")
def test_tune_without_a_gpu_says_so() -> None:
    done = subprocess.run([sys.executable, "-m", "minipaged", "tune"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(
        "error: tune measures the Triton kernels on a GPU, and they cannot run: torch finds no"
    )
    done = subprocess.run(
        [sys.executable, "-m", "minipaged", "tune", "--shape", "gpt-2"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "--shape gpt-2 is unknown; choose of qwen3-0.6b" in done.stderr


def test_the_benchmark_script_runs(tmp_path: Path) -> None:
    """Every section with tiny shapes; on a GPU the same calls are timed."""
    report = tmp_path / "gpu.json"
    command = [str(ROOT / "benchmarks" / "gpu.py"), "--rehearse", "--models", "qwen3-0.6b", "--json", str(report)]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    content = json.loads(report.read_text())
    assert "the numbers mean nothing" in content["about"]["rehearsal"]
    first = [next(iter(row)) for row in content["rows"]]
    for section in ("check", "decode attention", "prefill attention", "loaded", "decode, batch 1", "recipe"):
        assert section in first
    assert all(row["passed"] for row in content["rows"] if "check" in row)


def test_a_section_of_the_benchmark_that_raises_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location("gpu_benchmark", ROOT / "benchmarks" / "gpu.py")
    assert spec is not None
    assert spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)

    def rows() -> Iterator[dict[str, object]]:
        yield {"check": "one", "passed": True}
        raise RuntimeError("CUDA error: an illegal memory access")

    first, last = benchmark.guarded("check", rows())
    assert first["passed"]
    assert last == {"section": "check", "passed": False, "error": "RuntimeError: CUDA error: an illegal memory access"}
