"""Output into a stream whose encoding cannot hold it."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys

import pytest

from minipaged.cli.main import print_whatever_comes

TEXT = "caf\xe9 \u4f60\u597d \U0001f600 \udcff"  # the last one: a byte of the command line that is no UTF-8


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "utf-8"])
def test_what_an_encoding_cannot_hold_becomes_an_escape_of_json(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written = {name: io.BytesIO() for name in ("stdout", "stderr")}
    for name, stream in written.items():
        monkeypatch.setattr(sys, name, io.TextIOWrapper(stream, encoding, errors="strict"))
    print_whatever_comes()
    for name in written:
        print(json.dumps({"text": TEXT}, ensure_ascii=False), file=getattr(sys, name), flush=True)
    lines = [stream.getvalue().decode(encoding) for stream in written.values()]
    monkeypatch.undo()
    for line in lines:
        assert json.loads(line) == {"text": TEXT}
        assert line.startswith('{"text": "caf' + ("\\u00e9" if encoding == "ascii" else "\xe9"))


def test_a_stream_that_is_no_file_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    print_whatever_comes()


@pytest.mark.parametrize(
    "arguments", [["serve", "--help"], ["generate", TEXT[:-2], "--json", "--max-tokens", "2", "--num-blocks", "20"]]
)
@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_commands_keep_their_output(arguments: list[str], encoding: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}
    command = [sys.executable, "-m", "minipaged", *arguments]
    done = subprocess.run(command, capture_output=True, env=environment, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    if "--json" in arguments:  # where the encoding is ASCII, click takes the locale for broken and writes UTF-8
        output = json.loads(done.stdout.decode("utf-8" if encoding == "ascii" else encoding))
        assert output["outputs"][0]["prompt"] == TEXT[:-2]
        assert len(output["outputs"][0]["completions"][0]["token_ids"]) == 2
    else:
        assert b"minipaged serve Qwen/Qwen3-0.6B" in done.stdout
