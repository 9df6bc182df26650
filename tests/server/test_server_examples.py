"""The examples work against this server, and the dashboard asks for metrics that exist."""

from __future__ import annotations

import ast
import configparser
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from server_rig import Rig

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def test_openai_client(demo: Rig) -> None:
    command = [sys.executable, str(EXAMPLES / "openai_client.py"), demo.url]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert "model: demo" in result.stdout
    assert set(json.loads(result.stdout.splitlines()[-1])) == {"name", "age"}


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(demo: Rig) -> None:
    result = subprocess.run(
        ["sh", str(EXAMPLES / "curl.sh"), demo.url], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "data: [DONE]" in result.stdout
    assert 'minipaged:kv_blocks{state="free"}' in result.stdout


def test_langchain_example_is_valid_python() -> None:
    tree = ast.parse((EXAMPLES / "langchain_client.py").read_text())
    assert len(tree.body) <= 4, "a one-liner, more or less"


def test_every_metric_of_the_dashboard_exists(demo: Rig) -> None:
    dashboard = json.loads((EXAMPLES / "grafana-dashboard.json").read_text())
    asked = set(re.findall(r"minipaged:\w+", json.dumps(dashboard)))
    known = set(re.findall(r"^(minipaged:\w+)", demo.http.get("/metrics").text, re.MULTILINE))
    assert len(asked) > 12
    assert asked <= known
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)


def test_the_unit_gives_more_time_than_the_server_takes() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(EXAMPLES / "minipaged.service")
    service = unit["Service"]
    timeout = re.search(r"--shutdown-timeout (\d+)", service["ExecStart"])
    assert timeout is not None
    assert int(service["TimeoutStopSec"]) > int(timeout.group(1)) + 10
