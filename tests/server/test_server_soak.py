"""Ten minutes of mixed, rude and broken clients against a real server process: nothing of it may be left.

`MINIPAGED_SOAK_SECONDS` sets the length (default 600).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_rig import wait_until
from test_server_lifecycle import healthy, started

CLIENTS = 8
PARTS = 10  # with a pause after each, in which everything has to be idle
GROWTH_ALLOWED = 16 << 20  # bytes in the second half


def chat(rng: random.Random) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"question {rng.randrange(10**6)}"}]}


def any_request(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Good, odd and bad ones."""
    length = rng.choice([1, 3, 17, 64, 200])
    body: dict[str, Any] = {"prompt": [rng.randrange(256) for _ in range(length)], "max_tokens": rng.randint(1, 60)}
    path = "/v1/completions"
    if rng.random() < 0.4:
        path, body = "/v1/chat/completions", {**chat(rng), "max_tokens": rng.randint(1, 60)}
    choice = rng.randrange(10)
    if choice == 0:
        body |= {"n": 3, "temperature": 1.0}
    elif choice == 1:
        body |= {"guided_regex": "[a-z ]{5,20}"}
    elif choice == 2:
        body |= {"stop": ["e", "th"], "presence_penalty": 1.0, "repetition_penalty": 1.1}
    elif choice == 3 and path == "/v1/completions":
        body |= {"echo": True, "logprobs": 2}
    elif choice == 4:
        body |= {"max_tokens": 10**6}
    elif choice == 5:
        body |= {"temperature": "hot"}
    return path, {**body, "stream": rng.random() < 0.5}


async def client(url: str, seed: int, end: float, counts: dict[str, int]) -> None:
    rng = random.Random(seed)
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        while time.monotonic() < end:
            path, body = any_request(rng)
            leaves = rng.random() < 0.15
            try:
                async with http.stream("POST", path, json=body) as response:
                    counts[str(response.status_code)] = counts.get(str(response.status_code), 0) + 1
                    async for _ in response.aiter_bytes():
                        if leaves:
                            counts["left"] = counts.get("left", 0) + 1
                            break
            except httpx.TransportError as error:
                counts[type(error).__name__] = counts.get(type(error).__name__, 0) + 1
            if rng.random() < 0.05:
                _, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
                writer.write(rng.choice([b"", b"GET", b"nonsense\r\n\r\n", b"POST / HTTP/1.1\r\nHost: x\r\n"]))
                writer.close()


def resources(process: int) -> dict[str, int]:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
    return {
        "memory": int(status["VmRSS"].split()[0]) * 1024,
        "threads": int(status["Threads"]),
        "handles": len(list(Path(f"/proc/{process}/fd").iterdir())),
    }


def metric(url: str, name: str) -> float:
    text = httpx.get(url + "/metrics").text
    return next(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(f"minipaged:{name} "))


def idle(url: str) -> bool:
    return metric(url, "num_requests_running") == metric(url, "num_requests_waiting") == 0


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads /proc")
def test_soak() -> None:
    """No growth of memory, threads or file handles; at idle all blocks are free or idle; no 5xx, and a clean end."""
    seconds = float(os.environ.get("MINIPAGED_SOAK_SECONDS", "600"))
    command = [sys.executable, "-m", "minipaged", "serve", "--port", "0", "--num-blocks", "300", "--block-size", "4"]
    # torch and oneDNN keep compiled products for every batch size they meet: 200 MB that come bit by bit in the first
    # hour. Few batch sizes fill those caches at once, so that a leak of ours would show. One thread, because waiting
    # at barriers takes minutes where others use the same cores.
    command += ["--max-num-seqs", "6", "--max-num-batched-tokens", "16", "--threads", "1", "--check-invariants"]
    with started(command) as process:
        assert process.stdout is not None
        url = next(line for line in process.stdout if " on http" in line).split(" on ")[1].strip().removesuffix("/v1")
        wait_until(lambda: healthy(url), "it serves")
        counts: dict[str, int] = {}

        def play(length: float, seed: int) -> dict[str, int]:
            async def clients() -> None:
                end = time.monotonic() + length
                await asyncio.gather(*(client(url, seed + number, end, counts) for number in range(CLIENTS)))

            asyncio.run(clients())
            wait_until(lambda: idle(url), "it is idle")
            blocks = metric(url, 'kv_blocks{state="free"}') + metric(url, 'kv_blocks{state="idle"}')
            assert blocks == 300
            # Connections that were reset are closed a moment later.
            wait_until(lambda: resources(process.pid)["handles"] <= 40, "connections are closed")
            return resources(process.pid)

        states = [play(seconds / PARTS, 1000 * part) for part in range(PARTS)]
        print(json.dumps({"counts": counts, "states": states}))
        settled, after = states[PARTS // 2 - 1], states[-1]
        assert healthy(url)
        assert after["threads"] <= settled["threads"]
        assert after["handles"] <= settled["handles"] + 2
        assert after["memory"] <= settled["memory"] + GROWTH_ALLOWED, (settled, after)
        assert counts["200"] > seconds, "it was under load"
        assert counts["400"] > 0
        assert counts["left"] > 0
        assert not [status for status in counts if status.startswith("5")], counts
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
