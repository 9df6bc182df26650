"""How compute threads wait: a default of the command line, which libgomp reads when torch brings it in."""

from __future__ import annotations

import subprocess
import sys

import pytest

from minipaged.cli.main import limit_spinning


def test_threads_sleep_soon_by_default() -> None:
    environment = {"HOME": "/"}
    limit_spinning(environment)
    assert environment == {"HOME": "/", "GOMP_SPINCOUNT": "2000"}


@pytest.mark.parametrize("given", [{"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "7"}])
def test_what_the_user_says_counts(given: dict[str, str]) -> None:
    environment = dict(given)
    limit_spinning(environment)
    assert environment == given


def test_it_is_said_before_torch_is_there() -> None:
    program = "import sys, minipaged.cli.main; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "False\n"
