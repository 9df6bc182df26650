"""Servers on real sockets for the tests, over a scripted runner or the demo model. Everything ends with its `with`."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from minipaged.engine.config import EngineConfig
from minipaged.engine.engine import Engine
from minipaged.engine.plan import RowResult, SampledToken, StepPlan, StepResult
from minipaged.kv import KVBlockManager
from minipaged.llm.async_llm import AsyncLLM
from minipaged.outputs import Logprob
from minipaged.server import ServerSettings, create_app
from minipaged.server.lifecycle import Server, listen
from minipaged.text.chat_template import ChatTemplate
from minipaged.text.tokenizer import Tokenizer

VOCAB = 320  # 256 bytes, the tokens below, and ids that the tokenizer does not know
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ADDED = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
EOS = 258
WAIT = 20.0  # seconds after which a test that waits gives up

# What Qwen3's template does, in fewer words: tools in the system message, thoughts, the empty thought.
TEMPLATE = """
{%- if tools %}{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '<tools>' }}{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}{{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if not (loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{%- set given = call.function.arguments %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- given if given is string else given | tojson }}
{{- '}\\n' }}
{{- '</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\\n' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- if always_think %}{{- '<think>\\n' }}{%- endif %}
{%- endif %}"""


def write_byte_tokenizer(folder: Path) -> None:
    """id = byte for 0..255, then the special and the added tokens. What is not ASCII is cut into several tokens."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    name = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    backend = tokenizers.Tokenizer(models.BPE(vocab={name[b]: b for b in range(256)}, merges=[]))
    backend.pre_tokenizer = level
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in ADDED])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))


class ScriptedRunner:
    """Writes what the test says, one token per step, and stops where the test wants.

    script(sequence) -> token id. `gate` closed: the step waits in the middle of it; it closes by itself in step
    `close_at`. `errors`: raised by the next steps.
    """

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.reset()

    def reset(self) -> None:
        self.script: Callable[[Any], int] = lambda sequence: ord("a") + sequence.num_generated % 26
        self.steps = 0
        self.close_at: int | None = None
        self.in_step = threading.Event()
        self.errors: list[BaseException] = []
        self.delay = 0.0
        self.plans: list[list[tuple[int, int]]] = []
        self.params: list[Any] = []
        self.prompts: list[list[int]] = []
        self.gate.set()

    def says(self, tokens: str | bytes | Sequence[int]) -> None:
        """Every request gets these tokens and then the end of sequence."""
        ids = list(tokens.encode()) if isinstance(tokens, str) else list(tokens)
        self.script = lambda sequence: ids[sequence.num_generated] if sequence.num_generated < len(ids) else EOS

    def execute(self, plan: StepPlan) -> StepResult:
        self.steps += 1
        self.plans.append([(row.start, row.num_tokens) for row in plan.rows])
        if self.steps == self.close_at:
            self.gate.clear()
        self.in_step.set()
        if not self.gate.wait(WAIT):
            raise RuntimeError("the test has forgotten this step")
        self.in_step.clear()
        if self.delay:
            time.sleep(self.delay)
        if self.errors:
            raise self.errors.pop(0)
        return StepResult([self._row(row) for row in plan.rows])

    def _row(self, row: Any) -> RowResult:
        for sequence in row.sample_for:
            if not sequence.num_generated:
                self.params.append(sequence.params)
                self.prompts.append(list(sequence.token_ids))
        samples = [self._sample(sequence) for sequence in row.sample_for]
        result = RowResult(samples)
        if row.prompt_logprobs:
            end = min(row.start + row.num_tokens + 1, row.sequence.num_prompt_tokens)
            known = row.sequence.token_ids[row.start + 1 : end]
            result.prompt_logprobs = [{token: Logprob(-1.0, 1)} for token in known]
        return result

    def _sample(self, sequence: Any) -> SampledToken:
        token, wanted = self.script(sequence), sequence.params.logprobs
        if wanted is None:
            return SampledToken(token)
        top = {token: Logprob(-0.5, 1)} | {
            (token + rank) % VOCAB: Logprob(float("-inf") if rank == 2 else -1.0 * rank, rank + 1)
            for rank in range(1, wanted)
        }
        return SampledToken(token, -0.5, top)


class Rig:
    """A running server: `url`, `client` (official), `http` (plain), `llm`, `service`, `runner` if it is scripted."""

    def __init__(self, llm: AsyncLLM, settings: ServerSettings, template: ChatTemplate | None, runner: Any) -> None:
        self.llm = llm
        self.runner = runner
        self.app = create_app(llm, settings, chat_template=template)
        self.service = self.app.state.service
        sock = listen("127.0.0.1", 0)
        self.address = sock.getsockname()
        self.url = f"http://127.0.0.1:{self.address[1]}"
        self.server = Server(self.app)
        self._thread = threading.Thread(target=self.server.run, args=([sock],), name="test-server", daemon=True)
        self._thread.start()
        wait_until(lambda: self.server.started, "the server has started")
        key = settings.api_keys[0] if settings.api_keys else "none"
        self.client = openai.OpenAI(base_url=self.url + "/v1", api_key=key, max_retries=0, timeout=WAIT)
        self.http = httpx.Client(base_url=self.url, timeout=WAIT, headers={"Authorization": f"Bearer {key}"})

    def close(self) -> None:
        if self.runner is not None:
            self.runner.gate.set()
        self.client.close()
        self.http.close()
        self.server.stop()
        self._thread.join(WAIT)
        self.llm.close()
        assert not self._thread.is_alive(), "the server did not end"

    def wait_idle(self) -> None:
        """Nothing runs, nothing waits, all blocks are free or idle, nobody is remembered."""
        wait_until(self._idle, "the engine is idle")

    def _idle(self) -> bool:
        stats = self.llm.stats()
        return (
            stats.running == stats.waiting == stats.blocks_in_use == 0
            and not self.llm.engine.has_unfinished()
            and not self.service.admission.live
        )

    def connect(self) -> socket.socket:
        sock = socket.create_connection(self.address, WAIT)
        sock.settimeout(WAIT)
        return sock

    def send(self, path: str, body: Any) -> socket.socket:
        """A raw POST whose answer nobody has read yet."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        sock = self.connect()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
        )
        sock.sendall(head.encode() + raw)
        return sock

    def metric(self, name: str) -> float:
        """The value of one sample, labels included in the name."""
        for line in self.http.get("/metrics").text.splitlines():
            if line.startswith(f"minipaged:{name} "):
                return float(line.rpartition(" ")[2])
        raise AssertionError(f"no metric {name}")


def wait_until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end, f"it never happened: {what}"
        time.sleep(0.002)


@contextmanager
def stub_rig(
    tokenizer_folder: Path | None,
    *,
    num_blocks: int = 256,
    block_size: int = 4,
    template: str | None = TEMPLATE,
    engine: dict[str, Any] | None = None,
    **settings: Any,
) -> Iterator[Rig]:
    runner = ScriptedRunner()
    manager = KVBlockManager(num_blocks, block_size, enable_prefix_caching=True)
    defaults = SimpleNamespace(eos_token_ids=(EOS,), temperature=None, top_p=None, top_k=None, repetition_penalty=None)
    config = EngineConfig(**{"vocab_size": VOCAB, "generation_defaults": defaults, **(engine or {})})
    tokenizer = Tokenizer(tokenizer_folder) if tokenizer_folder is not None else None
    llm = AsyncLLM.from_engine(Engine(runner, manager, config, tokenizer=tokenizer))
    chat = ChatTemplate(template) if template is not None else None
    rig = Rig(llm, ServerSettings(**{"served_model_names": ("stub",), **settings}), chat, runner)
    try:
        yield rig
    finally:
        rig.close()


@contextmanager
def demo_rig(*, engine: dict[str, Any] | None = None, **settings: Any) -> Iterator[Rig]:
    options = {"num_blocks": 512, "block_size": 4, "dtype": "float32", "check_invariants": True, **(engine or {})}
    llm = AsyncLLM(None, **options)
    rig = Rig(llm, ServerSettings(**{"served_model_names": ("demo",), **settings}), None, None)
    try:
        yield rig
    finally:
        rig.close()


def events(response: httpx.Response) -> list[Any]:
    """The JSON of each server-sent event; "[DONE]" stays a string."""
    datas = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    return [data if data == "[DONE]" else json.loads(data) for data in datas]


def read_until(sock: socket.socket, wanted: bytes) -> bytes:
    data = b""
    while wanted not in data:
        more = sock.recv(65536)
        assert more, data
        data += more
    return data


def refusal(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error object; checks that it is one, in JSON, whatever the request asked for, without a traceback."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert "Traceback" not in response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error
