"""C17 and the equivalence matrix: whatever the engine does around a request, its logits and tokens are those of the
request alone.

Float32, tiny random Qwen3, every cache block poisoned with NaN before it is used and again when it loses its content.
Logits within 1e-4; tokens equal wherever the margin between the two largest logits is above 1e-3, and how many of these
there were is checked.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from minipaged import LLM, SamplingParams
from minipaged.engine.listeners import Poison
from minipaged.outputs import RequestOutput
from tiny import clear_positions, hf_logits, load_hf, random_tokens

MAX_TOKENS = 20
PROMPT_LENGTHS = (1, 5, 16, 23, 37)
PROMPTS = [random_tokens(length, seed=length) for length in PROMPT_LENGTHS]


class Recording:
    """An LLM of the tiny model that remembers the logits from which each token was drawn."""

    def __init__(self, folder: Path, *, block_size: int = 4, num_blocks: int = 128, **options: object) -> None:
        options = {"max_model_len": 200 if block_size > 1 else 100, "check_invariants": True, **options}
        self.llm = LLM(folder, block_size=block_size, num_blocks=num_blocks, **options)
        torch.set_num_threads(1)  # of so little work, a second thread only makes more
        self.engine = self.llm.engine
        self.llm.loaded.events.listeners.append(Poison(self.llm.loaded.caches))
        self.logits: dict[int, list[torch.Tensor]] = {}
        sampler = self.engine.runner.sampler
        original = sampler.sample

        def sample(logits, sequences):
            for row, sequence in zip(logits, sequences, strict=True):
                self.logits.setdefault(sequence.sequence_id, []).append(row.clone())
            return original(logits, sequences)

        sampler.sample = sample
        self.last: dict[str, RequestOutput] = {}
        self.requests = {}

    def add(self, request_id: str, prompt: list[int], **params: object) -> None:
        params = {"temperature": 0.0, "max_tokens": MAX_TOKENS, "ignore_eos": True, "seed": 1, **params}
        self.engine.add_request(request_id, prompt, SamplingParams(**params))
        self.requests[request_id] = self.engine._live[request_id]

    def step(self) -> None:
        for output in self.engine.step():
            self.last[output.request_id] = output

    def run(self) -> None:
        while self.engine.has_unfinished():
            self.step()

    def result(self, request_id: str, index: int = 0) -> tuple[list[int], torch.Tensor]:
        """Generated tokens, and the logits [generated, vocabulary] that they were drawn from."""
        child = self.requests[request_id].sequences[index]
        return self.last[request_id].outputs[index].token_ids, torch.stack(self.logits[child.sequence_id])


@pytest.fixture(scope="module")
def oracle(tiny_folder: Path) -> Callable[..., tuple[list[int], torch.Tensor]]:
    """A request alone: no prefix cache, one-shot prefill, a large pool; checked against Hugging Face."""
    known: dict = {}
    model = load_hf(tiny_folder)

    def run(prompt: list[int], index: int = 0, **params: object) -> tuple[list[int], torch.Tensor]:
        key = (tuple(prompt), index, tuple(sorted(params.items())))
        if key not in known:
            alone = Recording(tiny_folder, enable_prefix_caching=False)
            alone.add("alone", prompt, **params)
            alone.run()
            tokens, logits = alone.result("alone", index)
            reference = hf_logits(model, [*prompt, *tokens])[len(prompt) - 1 : -1]
            torch.testing.assert_close(logits, reference, atol=1e-4, rtol=0)
            known[key] = (tokens, logits)
        return known[key]

    return run


def compare(got: tuple[list[int], torch.Tensor], wanted: tuple[list[int], torch.Tensor]) -> int:
    """Compare position by position; returns how many positions had a clear winner (and hence the same token)."""
    (tokens, logits), (wanted_tokens, wanted_logits) = got, wanted
    assert len(tokens) == len(wanted_tokens) == len(logits)
    clear = clear_positions(wanted_logits)
    for position, (token, wanted_token) in enumerate(zip(tokens, wanted_tokens, strict=True)):
        torch.testing.assert_close(logits[position], wanted_logits[position], atol=1e-4, rtol=0)
        if token != wanted_token:
            assert not clear[position]
            return int(clear[:position].sum())  # a near tie: from here on the histories differ
    return int(clear.sum())


def check_all(rig: Recording, oracle: Callable[..., tuple[list[int], torch.Tensor]]) -> None:
    compared = sum(compare(rig.result(str(n)), oracle(prompt)) for n, prompt in enumerate(PROMPTS))
    assert compared >= 0.9 * MAX_TOKENS * len(PROMPTS)


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_cold_then_warm(tiny_folder: Path, oracle: Callable, block_size: int) -> None:
    rig = Recording(tiny_folder, block_size=block_size, num_blocks=256)
    for _ in range(2):
        for number, prompt in enumerate(PROMPTS):
            rig.add(str(number), prompt)
            rig.run()
        check_all(rig, oracle)
        rig.logits.clear()
        cached = [rig.last[str(number)].num_cached_tokens for number in range(len(PROMPTS))]
    assert cached == [(length - 1) // block_size * block_size for length in PROMPT_LENGTHS]


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 7, 16])
def test_chunked(tiny_folder: Path, oracle: Callable, chunk: int) -> None:
    rig = Recording(tiny_folder, max_num_batched_tokens=chunk)
    for number, prompt in enumerate(PROMPTS):
        rig.add(str(number), prompt)
        rig.run()
    check_all(rig, oracle)


@pytest.mark.parametrize("block_size", [3, 16])
def test_batched_with_seven_others(tiny_folder: Path, oracle: Callable, block_size: int) -> None:
    rig = Recording(tiny_folder, block_size=block_size, max_num_batched_tokens=24)
    for number, prompt in enumerate(PROMPTS):
        rig.add(str(number), prompt)
    for number in range(7 - len(PROMPTS) + 1):
        rig.add(f"other{number}", random_tokens(9 + 20 * number, seed=100 + number), temperature=1.0)
        rig.step()
    rig.run()
    check_all(rig, oracle)


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("past", [0, 1])
@pytest.mark.parametrize("caching", [True, False])
def test_preempted(tiny_folder: Path, oracle: Callable, block_size: int, past: int, caching: bool) -> None:
    """Each sequence is preempted when it has k * block_size (+ 1) tokens in memory."""
    rig = Recording(tiny_folder, block_size=block_size, num_blocks=256, enable_prefix_caching=caching)
    for number, prompt in enumerate(PROMPTS):
        rig.add(str(number), prompt)
    preempted = set()
    while rig.engine.has_unfinished():
        rig.step()
        for child in list(rig.engine.scheduler.running):
            generated = child.num_generated
            if child not in preempted and generated > 1 and child.num_computed % block_size == past % block_size:
                preempted.add(child)
                rig.engine.scheduler.preempt(child)
    assert len(preempted) >= 3
    check_all(rig, oracle)


def test_preempted_for_lack_of_blocks(tiny_folder: Path, oracle: Callable) -> None:
    rig = Recording(tiny_folder, num_blocks=18, max_model_len=64, max_num_batched_tokens=11)
    for number, prompt in enumerate(PROMPTS):
        rig.add(str(number), prompt)
    rig.run()
    assert rig.engine.stats().preemptions > 0
    check_all(rig, oracle)


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_forked(tiny_folder: Path, oracle: Callable, block_size: int) -> None:
    """C13: each of three children equals the same child without sharing, greedy and random."""
    rig = Recording(tiny_folder, block_size=block_size, num_blocks=256)
    for number, prompt in enumerate(PROMPTS):
        rig.add(f"greedy{number}", prompt, n=3)
        rig.add(f"random{number}", prompt, n=3, temperature=1.0)
    rig.run()
    compared = 0
    for number, prompt in enumerate(PROMPTS):
        for index in range(3):
            compared += compare(rig.result(f"greedy{number}", index), oracle(prompt))
            tokens, logits = rig.result(f"random{number}", index)
            wanted_tokens, wanted_logits = oracle(prompt, index, n=3, temperature=1.0)
            torch.testing.assert_close(logits, wanted_logits, atol=1e-4, rtol=0)
            assert tokens == wanted_tokens
    assert compared >= 0.9 * 3 * MAX_TOKENS * len(PROMPTS)


def test_beside_an_aborted_neighbour(tiny_folder: Path, oracle: Callable) -> None:
    rig = Recording(tiny_folder, num_blocks=64, max_num_batched_tokens=16)
    for number, prompt in enumerate(PROMPTS):
        rig.add(f"neighbour{number}", [*prompt[: len(prompt) // 2], *random_tokens(20, seed=50 + number)], n=2)
        rig.add(str(number), prompt)
    for number in range(len(PROMPTS)):
        rig.step()
        rig.engine.abort(f"neighbour{number}")
    rig.run()
    check_all(rig, oracle)
    assert {rig.last[f"neighbour{number}"].outputs[0].finish_reason for number in range(len(PROMPTS))} == {"abort"}


def test_prompt_logprobs_with_a_warm_cache(tiny_folder: Path, oracle: Callable) -> None:
    """C18: 12 entries, the first None, equal to the raw distribution of a run without any cache."""
    prompt = random_tokens(12, seed=3)
    rig = Recording(tiny_folder, max_num_batched_tokens=5)
    rig.add("warm", prompt)
    rig.run()
    rig.add("scored", prompt, prompt_logprobs=1, logprobs=1)
    rig.run()
    wanted = torch.log_softmax(hf_logits(load_hf(tiny_folder), prompt), dim=-1)
    entries = rig.last["scored"].prompt_logprobs
    assert len(entries) == 12
    assert entries[0] is None
    for position, entry in enumerate(entries[1:]):
        token = prompt[position + 1]
        assert entry[token].logprob == pytest.approx(wanted[position, token].item(), abs=1e-4)
        assert entry[int(wanted[position].argmax())].rank == 1
    compare(rig.result("scored"), oracle(prompt))
