"""The workloads are the ones that other engines are measured with, token for token."""

from __future__ import annotations

import hashlib

import pytest

from minipaged.bench.workloads import WORKLOADS, total_length, workload

# requests, prompt tokens, output tokens
SIZES = {
    "W1": (1, 128, 128),
    "W2": (8, 1024, 1024),
    "W3": (32, 10_149, 4_555),
    "W4": (1, 2048, 1),
    "W5": (1, 8192, 32),
    "recipe": (256, 142_827, 133_966),
    "shared-prefix": (16, 16 * 1088, 16 * 64),
    "long-prompt": (1, 16_384, 64),
}

ENDS = {
    "W1": (71978, 108986),
    "W2": (126636, 69400),
    "W3": (132273, 106370),
    "W4": (109966, 100888),
    "W5": (101618, 42147),
}
DIGEST = "819e9ad3fee5af1d0360cd177f415080228c8be897097580e2c49334c9eb804f"


@pytest.mark.parametrize("name", WORKLOADS)
def test_sizes(name: str) -> None:
    made = workload(name)
    assert (len(made.requests), made.prompt_tokens, made.output_tokens) == SIZES[name]
    assert made == workload(name.lower())  # the same every time


def test_w1_to_w5_are_the_published_token_ids() -> None:
    """First and last id of each, and a digest of all: made once with the scripts that measured the rivals."""
    made = {name: workload(name).requests for name in ENDS}
    assert {name: (requests[0].prompt[0], requests[-1].prompt[-1]) for name, requests in made.items()} == ENDS
    numbers = ",".join(str(t) for requests in made.values() for r in requests for t in (*r.prompt, r.output_tokens))
    assert hashlib.sha256(numbers.encode()).hexdigest() == DIGEST


def test_lengths_of_w3_and_of_the_recipe() -> None:
    lengths = [(len(r.prompt), r.output_tokens) for r in workload("W3").requests]
    assert all(100 <= prompt <= 512 and 32 <= output <= 256 for prompt, output in lengths)
    lengths = [(len(r.prompt), r.output_tokens) for r in workload("recipe").requests]
    assert all(100 <= prompt <= 1024 and 100 <= output <= 1024 for prompt, output in lengths)


def test_only_shared_prefix_uses_the_prefix_cache() -> None:
    assert [name for name in WORKLOADS if workload(name).prefix_caching] == ["shared-prefix"]
    prompts = [request.prompt for request in workload("shared-prefix").requests]
    assert len({tuple(p[:1024]) for p in prompts}) == 1
    assert len({p[1024] for p in prompts}) == len(prompts)


def test_small_vocabulary_keeps_lengths() -> None:
    made = workload("W3")
    folded = made.for_vocabulary(320)
    assert max(max(r.prompt) for r in folded.requests) < 320
    assert [len(r.prompt) for r in folded.requests] == [len(r.prompt) for r in made.requests]
    assert "320" in folded.description
    assert made.for_vocabulary(151936) is made


def test_resized() -> None:
    made = workload("W2").resized(300, 4)
    assert {(len(r.prompt), r.output_tokens) for r in made.requests} == {(300, 4)}
    assert made.requests[0].prompt[128:256] == workload("W2").requests[0].prompt
    assert total_length(made.requests) == 304
    assert workload("W2").resized(None, None) == workload("W2")


def test_unknown_workload() -> None:
    with pytest.raises(ValueError, match=r"'W9' is unknown.*W1, W2.*recipe"):
        workload("W9")
