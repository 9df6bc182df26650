"""`LLM`: prompts in every form, streams, chat, what comes back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from llm_rig import GREEDY, is_idle, load

from minipaged import LLM, RequestOutput, SamplingParams
from minipaged.errors import RequestTooLargeError
from tiny import clear_positions, hf_logits, load_hf, random_tokens


@pytest.fixture(scope="module")
def text_folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a byte tokenizer (ids 0 to 255) and two special tokens, 300 and 301; ids between have no
    text.
    """
    from shutil import copytree

    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("llm") / "text"
    copytree(tiny_folder, folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: number for number, character in enumerate(alphabet)}
    vocab |= {"<|im_end|>": 300, "<|endoftext|>": 301}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|im_end|>", special=True), AddedToken("<|endoftext|>", special=True)])
    backend.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
        "{% if not enable_thinking | default(true) %}(no thinking){% endif %}"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


@pytest.fixture(scope="module")
def llm(text_folder: Path) -> LLM:
    return load(text_folder)


def test_greedy_equals_hugging_face(bare: LLM, tiny_folder: Path) -> None:
    prompts = [random_tokens(3 + 9 * number, seed=number) for number in range(6)]
    model = load_hf(tiny_folder)
    compared = 0
    for prompt, output in zip(prompts, bare.generate(prompts, GREEDY, use_tqdm=False), strict=True):
        assert output.prompt_token_ids == prompt
        tokens = output.outputs[0].token_ids
        logits = hf_logits(model, [*prompt, *tokens])[len(prompt) - 1 : -1]
        clear = clear_positions(logits)
        assert torch.equal(logits.argmax(-1)[clear], torch.tensor(tokens)[clear])
        compared += int(clear.sum())
    assert compared > 40


@pytest.mark.parametrize("form", ["list", "tuple", "numpy", "tensor"])
def test_one_prompt_of_token_ids_in_any_form(bare: LLM, form: str) -> None:
    convert = {"list": list, "tuple": tuple, "numpy": np.array, "tensor": torch.tensor}[form]
    (output,) = bare.generate(convert([1, 2, 3]), GREEDY, use_tqdm=False)
    assert output.prompt_token_ids == [1, 2, 3]
    (again,) = bare.generate([convert([1, 2, 3])], GREEDY, use_tqdm=False)
    assert again.outputs[0].token_ids == output.outputs[0].token_ids
    assert bare.generate([], GREEDY) == []


def test_strings_text_and_stop(llm: LLM) -> None:
    one, two = llm.generate(["hello", "other"], GREEDY, use_tqdm=False)
    assert (one.prompt, two.prompt) == ("hello", "other")
    assert one.prompt_token_ids == llm.tokenizer.encode("hello")
    assert one.outputs[0].text == llm.tokenizer.decode(one.outputs[0].token_ids)
    assert one.outputs[0].finish_reason == "length"


def test_each_prompt_its_own_parameters(bare: LLM) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (2, 5)]
    outputs = bare.generate([[1], [2]], params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [2, 5]
    with pytest.raises(ValueError, match="2 of them for 1 prompts"):
        bare.generate([[1]], params)


def test_one_invalid_prompt_stops_all_before_any_runs(bare: LLM) -> None:
    steps = bare.engine.num_steps
    with pytest.raises(ValueError, match="empty"):
        bare.generate([[1, 2], [], [3]], GREEDY)
    with pytest.raises(RequestTooLargeError):
        bare.generate([[1, 2], [1] * 399], GREEDY)
    with pytest.raises(ValueError, match="no tokenizer"):
        bare.generate([[1, 2], "text"], GREEDY)
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        bare.generate([[1, 2]], SamplingParams(stop="x"))
    with pytest.raises(ValueError, match="no tokenizer"):
        bare.chat([{"role": "user", "content": "hi"}])
    assert bare.engine.num_steps == steps
    assert is_idle(bare)


def test_without_a_tokenizer_the_text_is_empty(bare: LLM) -> None:
    (output,) = bare.generate([1, 2], GREEDY, use_tqdm=False)
    assert output.outputs[0].text == ""
    assert len(output.outputs[0].token_ids) == 8


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_adds_up_to_the_whole(llm: LLM, n: int) -> None:
    params = SamplingParams(temperature=1.0, seed=4, n=n, max_tokens=20, logprobs=1, ignore_eos=True)
    (whole,) = llm.generate("abc", params, use_tqdm=False)
    parts = list(llm.stream("abc", params))
    assert [part.finished for part in parts] == [False] * (len(parts) - 1) + [True]
    for index in range(n):
        children = [part.outputs[index] for part in parts]
        assert "".join(child.text for child in children) == whole.outputs[index].text
        assert [token for child in children for token in child.token_ids] == whole.outputs[index].token_ids
        assert [entry for child in children for entry in child.logprobs] == whole.outputs[index].logprobs
        assert all(len(child.token_ids) <= 1 for child in children)
        assert children[-1].finish_reason == "length"


def test_a_stream_is_checked_when_it_is_asked_for(bare: LLM) -> None:
    with pytest.raises(ValueError, match="empty"):
        bare.stream([], GREEDY)


def test_chat(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    (output,) = llm.chat(messages, GREEDY, use_tqdm=False)
    assert output.prompt == "user: hi<|im_end|>"
    assert output.prompt_token_ids[-1] == 300
    (quiet,) = llm.chat(messages, GREEDY, use_tqdm=False, chat_template_kwargs={"enable_thinking": False})
    assert quiet.prompt.endswith("(no thinking)")
    several = llm.chat([messages, messages], GREEDY, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in several] == [output.outputs[0].token_ids] * 2
    streamed = "".join(part.outputs[0].text for part in llm.stream_chat(messages, GREEDY))
    assert streamed == output.outputs[0].text


def test_end_of_sequence_ids_come_from_the_model(llm: LLM) -> None:
    """C31: generation_config lists 300 and 301; either ends the text, and neither is in it."""
    for eos in (300, 301):
        params = SamplingParams(temperature=0.0, max_tokens=8, logit_bias={eos: 100.0})
        (output,) = llm.generate("abc", params, use_tqdm=False)
        assert output.outputs[0].token_ids == [eos]
        assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("", "stop")
        assert output.outputs[0].stop_reason is None


def test_min_tokens_and_ignore_eos(llm: LLM) -> None:
    """C38, with a model that wants to end at once."""
    bias = {300: 90.0, 301: 100.0}
    base = {"temperature": 0.0, "max_tokens": 8, "logit_bias": bias}
    first = llm.generate("abc", SamplingParams(min_tokens=5, **base), use_tqdm=False)[0].outputs[0]
    assert (len(first.token_ids), first.token_ids[-1], first.finish_reason) == (6, 301, "stop")
    assert not {300, 301} & set(first.token_ids[:5])
    ignoring = llm.generate("abc", SamplingParams(ignore_eos=True, **base), use_tqdm=False)[0].outputs[0]
    assert (len(ignoring.token_ids), ignoring.finish_reason) == (8, "length")


def test_logprobs_have_texts(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    (output,) = llm.generate("ab", params, use_tqdm=False)
    completion = output.outputs[0]
    for token, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        assert entry[token].decoded_token == llm.tokenizer.token_text(token)
    assert completion.cumulative_logprob == pytest.approx(
        sum(entry[token].logprob for token, entry in zip(completion.token_ids, completion.logprobs, strict=True))
    )
    assert output.prompt_logprobs[1][output.prompt_token_ids[1]].decoded_token == "b"


def test_outputs_are_request_outputs(bare: LLM) -> None:
    (output,) = bare.generate([1, 2, 3], SamplingParams(n=2, max_tokens=2), use_tqdm=False)
    assert isinstance(output, RequestOutput)
    assert output.metrics.finished_time >= output.metrics.first_token_time >= output.metrics.arrival_time
    assert output.num_cached_tokens == 0


@pytest.mark.parametrize(
    "prompt", [None, 5, 1.5, [1.5], [None], [True, False], b"abc", {"prompt": "abc"}, {1, 2}, [[1, "a"]], [[1], 5]]
)
def test_what_is_no_prompt(tiny_folder: Path, prompt: object) -> None:
    with load(tiny_folder) as llm, pytest.raises(ValueError, match="a prompt is a string or a list of token ids"):
        llm.generate(prompt, GREEDY, use_tqdm=False)  # type: ignore[arg-type]


@pytest.mark.parametrize("params", [{"max_tokens": 2}, 5, [5], "ab"])
def test_what_are_no_sampling_params(tiny_folder: Path, params: object) -> None:
    with load(tiny_folder) as llm, pytest.raises((TypeError, ValueError), match="sampling_params"):
        llm.generate([1, 2], params, use_tqdm=False)  # type: ignore[arg-type]
