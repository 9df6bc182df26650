"""What a request may ask for: prompts, parameters and lengths are checked before anything happens."""

from __future__ import annotations

import numpy as np
import pytest
from stub_engine import StubEngine, alone

from minipaged.errors import RequestTooLargeError
from minipaged.sampling_params import SamplingParams


def test_a_live_id_is_refused_and_a_finished_one_is_free_again() -> None:
    """C47."""
    stub = StubEngine()
    stub.add("r", [1, 2], max_tokens=3)
    with pytest.raises(ValueError, match="'r' is alive"):
        stub.add("r", [3, 4])
    stub.step()
    with pytest.raises(ValueError, match="'r' is alive"):
        stub.add("r", [3, 4])
    stub.run()
    assert [stub.tokens("r")] == alone([1, 2], max_tokens=3)
    stub.add("r", [3, 4], max_tokens=3)
    stub.run()
    assert [stub.tokens("r")] == alone([3, 4], max_tokens=3)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "empty"),
        ([1, 320], "token id 320 .* vocabulary of 320"),
        ([1, -1], "token id -1"),
        ([1, 2.5], r"got an element 2\.5"),
        (["a"], "got an element 'a'"),
        ("text", "no tokenizer"),
    ],
)
def test_prompts_that_make_no_sense_have_no_effect(prompt: object, message: str) -> None:
    """C42."""
    stub = StubEngine()
    with pytest.raises(ValueError, match=message):
        stub.engine.add_request("r", prompt, SamplingParams())
    assert not stub.engine.has_unfinished()
    stub.add("r", [1], max_tokens=1)
    assert stub.run()["r"].finished


def test_numpy_token_ids_are_fine() -> None:
    stub = StubEngine()
    stub.add("r", np.array([1, 2, 3]), max_tokens=3)
    assert stub.run()["r"].prompt_token_ids == [1, 2, 3]
    assert [stub.tokens("r")] == alone([1, 2, 3], max_tokens=3)


def test_stop_strings_and_biases_are_checked_before_anything_happens() -> None:
    stub = StubEngine()
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        stub.add("r", [1], stop="x")
    with pytest.raises(ValueError, match="outside the vocabulary"):
        stub.add("r", [1], logit_bias={320: 1.0})
    assert not stub.engine.has_unfinished()


def test_a_request_larger_than_the_pool_is_told_to_raise_the_pool() -> None:
    """C03: without a `max_model_len` the pool is the only limit, so the message names the options that move it."""
    stub = StubEngine(num_blocks=4, block_size=4)
    with pytest.raises(RequestTooLargeError, match="num_blocks") as caught:
        stub.add("a", [1] * 14, max_tokens=4)
    assert "max_model_len" not in str(caught.value)
    assert not stub.engine.has_unfinished()
    stub.add("fits", [1] * 14, max_tokens=3)  # the last token is never written: 17 tokens in 16 slots
    assert len(stub.run()["fits"].outputs[0].token_ids) == 3
