"""Flags: what a wrong value is told, and where the lists of names come from."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable

import pytest
from typer.testing import CliRunner

from minipaged.cli.main import app
from minipaged.kv import KVBlockManager
from minipaged.llm.options import EngineOptions
from minipaged.ops import available_backends, get_backend
from minipaged.sampling_params import SamplingParams


def said_of(*arguments: str) -> str:
    """What a command that is used wrongly says, without the frame and line breaks of a terminal."""
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})
    assert result.exit_code == 2, result.output
    return re.sub(r"[\s│]+", " ", result.output)


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--kv-cache-memory", "1GiB", "got '1GiB'; a number of bytes, for example 1073741824"),
        ("--max-tokens", "abc", "got 'abc'; a number of tokens, for example 100"),
        ("--temperature", "warm", "got 'warm'; a number, for example 0.7"),
        ("--seed", "1.5", "got '1.5'; a whole number"),
        ("--gpu-memory-utilization", "90%", "got '90%'; a share above 0 and at most 1, for example 0.9"),
    ],
)
def test_what_is_no_number_is_told_the_unit(flag: str, value: str, said: str) -> None:
    message = said_of("generate", "hi", flag, value)
    assert said in message
    assert flag in message


def test_the_least_value_of_a_flag_holds() -> None:
    assert "got '0'; a whole number, at least 1" in said_of("bench", "prefill", "--prompt-tokens", "0")


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--max-tokens", "0", "max_tokens must be an integer from 1, got 0"),
        ("--num-blocks", "0", "num_blocks must be an integer of at least 1 or left out, got 0"),
        ("--backend", "abacus", f"choose one of {', '.join(map(repr, available_backends()))}"),
        ("--kv-journal", "", "kv_journal must be a name or left out, got ''"),
        ("--top-p", "1.5", "top_p must be a finite number from 0 to 1, got 1.5"),
        ("--block-size", "0", "block_size must be an integer of at least 1, got 0"),
        ("--threads", "0", "threads must be an integer of at least 1 or left out, got 0"),
        ("--eviction-policy", "mru", "choose one of ['lfu', 'lru']"),
    ],
)
def test_no_error_offers_what_a_flag_cannot_be_given(flag: str, value: str, said: str) -> None:
    message = said_of("generate", "hi", flag, value)
    assert said in message
    assert "None" not in message
    assert "object" not in message


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: SamplingParams(max_tokens=0),
        lambda: SamplingParams(top_p=1.5),
        lambda: EngineOptions(threads=0),
        lambda: EngineOptions(kv_journal=""),
        lambda: EngineOptions(tokenizer=5),  # type: ignore[arg-type]
        lambda: get_backend("abacus"),
        lambda: KVBlockManager(4, 4, eviction_policy="mru"),
    ],
)
def test_what_the_library_says_is_right_for_a_flag_too(wrong: Callable[[], object]) -> None:
    """One wording for both, so that the command line passes it on as it is."""
    with pytest.raises(ValueError, match=r"got|choose one of") as raised:
        wrong()
    assert "None" not in str(raised.value)
    assert "object" not in str(raised.value)


def test_help_lists_the_back_ends_of_the_registry_without_torch() -> None:
    code = (
        "import sys; from minipaged.cli.options import LLM_FLAGS; "
        "print('torch' in sys.modules, [flag.help for flag in LLM_FLAGS if flag.name == 'backend'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.startswith("False")
    assert ", ".join(available_backends()) in done.stdout
