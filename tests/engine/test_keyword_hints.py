"""What is said of a keyword that does not exist: which one may have been meant, or where the list is."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from minipaged import LLM, AsyncLLM, SamplingParams

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("call", "keyword", "hint"),
    [
        (LLM, "max_model_length", r"did you mean max_model_len( or .*)?\?"),
        (LLM, "tensor_parallel_size", r"the list is in help\(minipaged.LLM\)"),
        (AsyncLLM, "num_block", "did you mean num_blocks"),
        (AsyncLLM, "tensor_parallel_size", r"the list is in help\(minipaged.LLM\)"),
        (SamplingParams, "temprature", r"did you mean temperature\?"),
        (SamplingParams, "best_of", r"the list is in help\(SamplingParams\)"),
    ],
)
def test_constructors(call: Callable[..., Any], keyword: str, hint: str) -> None:
    with pytest.raises(
        TypeError, match=rf"^{call.__name__}\(\) got an unexpected keyword argument '{keyword}': {hint}"
    ):
        call(**{keyword: 2})


def test_sampling_params_stay_what_they_are() -> None:
    params = SamplingParams(2, temperature=0.5)
    assert params == SamplingParams(n=2, temperature=0.5) == copy.deepcopy(params) == pickle.loads(pickle.dumps(params))


@pytest.fixture(scope="module")
def demo() -> LLM:
    return LLM(num_blocks=64, max_model_len=128, dtype="float32")


@pytest.mark.parametrize("name", ["chat", "stream_chat"])
def test_chat(demo: LLM, name: str) -> None:
    call = getattr(demo, name)
    with pytest.raises(TypeError, match=r"'temprature': did you mean temperature"):
        call(MESSAGES, temprature=0)
    with pytest.raises(TypeError, match=r"temperature in sampling_params: SamplingParams\(temperature="):
        call(MESSAGES, temperature=0)
    with pytest.raises(TypeError, match="'sampling_param': did you mean sampling_params"):
        call(MESSAGES, sampling_param=SamplingParams())
    with pytest.raises(TypeError, match="'wherever': the list is in"):
        call(MESSAGES, wherever=1)
    one = SamplingParams(max_tokens=1)
    options = {"tools": None, "add_generation_prompt": True, "continue_final_message": False, "enable_thinking": False}
    assert list(call(MESSAGES, one, **options, chat_template_kwargs={"whatever": 1}))
    assert list(call(MESSAGES, one, template="{{ mine }}", mine="ROMEO:"))
