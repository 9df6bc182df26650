"""The OpenAPI description, and two minutes of requests that schemathesis makes from it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from server_rig import Rig, stub_rig


def test_the_schema_describes_what_there_is(stub: Rig) -> None:
    schema = stub.http.get("/openapi.json").json()
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize", "/detokenize", "/health", "/ready",
            "/version", "/metrics", "/"} <= set(schema["paths"])  # fmt: skip
    body = schema["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert "messages" in body["required"]
    assert {"chat_template_kwargs", "max_completion_tokens", "guided_regex", "cache_salt"} <= set(body["properties"])
    assert "$ref" not in str(body)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_schemathesis(tokenizer_folder: Path, tmp_path: Path) -> None:
    """MINIPAGED_SCHEMA_SECONDS (default 120) of generated requests, good and bad: no 5xx, only documented answers."""
    seconds = int(os.environ.get("MINIPAGED_SCHEMA_SECONDS", "120"))
    parts = {
        0.4: ("--include-path", "/v1/completions"),
        0.41: ("--include-path", "/v1/chat/completions"),
        0.19: ("--exclude-path-regex", "^/v1/(chat/)?completions$"),
    }
    with stub_rig(tokenizer_folder, engine={"max_model_len": 200}) as rig:
        for share, selection in parts.items():
            before = rig.runner.steps
            command = [
                *(sys.executable, "-m", "schemathesis.cli", "run", f"{rig.url}/openapi.json", *selection),
                *("--max-time", str(max(1, round(seconds * share))), "--max-examples", "100000", "--workers", "1"),
                *("--checks", "not_a_server_error,status_code_conformance,content_type_conformance"),
                *("--phases", "coverage,fuzzing", "--no-color"),
            ]
            result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=300)
            assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
            rig.wait_idle()
            assert share < 0.2 or rig.runner.steps > before + 20, "it got as far as the engine"
        assert rig.http.get("/health").status_code == 200
