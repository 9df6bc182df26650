"""The OpenAPI description, and the requests that schemathesis makes from it."""

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
@pytest.mark.timeout(1200)  # two minutes on a quiet machine
def test_schemathesis(tokenizer_folder: Path, tmp_path: Path) -> None:
    """MINIPAGED_SCHEMA_EXAMPLES (default 300) of generated requests to each of the two large operations, good and bad,
    and a tenth as many to each of the others: no 5xx, only documented answers. Examples and not seconds: how many of
    them reach the engine must not depend on what else the machine does.
    """
    examples = int(os.environ.get("MINIPAGED_SCHEMA_EXAMPLES", "300"))
    parts = (
        (examples, 20, "--include-path", "/v1/completions"),
        (examples, 20, "--include-path", "/v1/chat/completions"),
        (max(1, examples // 10), 0, "--exclude-path-regex", "^/v1/(chat/)?completions$"),
    )
    with stub_rig(tokenizer_folder, engine={"max_model_len": 200}) as rig:
        for count, least_steps, *selection in parts:
            before = rig.runner.steps
            command = [
                *(sys.executable, "-m", "schemathesis.cli", "run", f"{rig.url}/openapi.json", *selection),
                *("--max-examples", str(count), "--workers", "1", "--request-timeout", "120"),
                *("--checks", "not_a_server_error,status_code_conformance,content_type_conformance"),
                *("--phases", "coverage,fuzzing", "--no-color"),
            ]
            for _ in range(5):  # of forty conversations, one or none is good enough for the engine
                result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=600)
                assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
                rig.wait_idle()
                if rig.runner.steps >= before + least_steps:
                    break
            assert rig.runner.steps >= before + least_steps, "it got as far as the engine"
        assert rig.http.get("/health").status_code == 200
