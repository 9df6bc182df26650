"""`LLM`: prompts in every form, lifetimes, sizing, two at once."""

from __future__ import annotations

import inspect
import json
import threading
import warnings
from itertools import zip_longest
from pathlib import Path

import numpy as np
import pytest
import torch

from minipaged import LLM, RequestOutput, SamplingParams
from minipaged.errors import RequestTooLargeError
from tiny import clear_positions, hf_logits, load_hf, random_tokens

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def load(folder: Path, **options: object) -> LLM:
    options = {"block_size": 4, "num_blocks": 160, "max_model_len": 400, "check_invariants": True, **options}
    llm = LLM(folder, **options)
    torch.set_num_threads(1)
    return llm


def is_idle(llm: LLM) -> bool:
    stats = llm.engine.stats()
    return stats.blocks_free + stats.blocks_idle == stats.blocks_total and not llm.engine.has_unfinished()


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


@pytest.fixture(scope="module")
def bare(tiny_folder: Path) -> LLM:
    """Without a tokenizer."""
    return load(tiny_folder)


def test_the_signature_is_the_contracts() -> None:
    parameters = inspect.signature(LLM).parameters
    assert {name: p.default for name, p in parameters.items()} == {
        "model": None,
        "tokenizer": None,
        "revision": None,
        "dtype": "auto",
        "device": "auto",
        "backend": None,
        "block_size": 16,
        "num_blocks": None,
        "kv_cache_memory": None,
        "gpu_memory_utilization": 0.9,
        "max_model_len": None,
        "max_num_seqs": 64,
        "max_num_batched_tokens": None,
        "enable_prefix_caching": True,
        "eviction_policy": "lru",
        "scheduling_policy": "fcfs",
        "seed": 0,
        "threads": None,
        "check_invariants": False,
        "kv_journal": None,
    }
    assert all(p.kind is p.KEYWORD_ONLY for name, p in parameters.items() if name != "model")
    with pytest.raises(TypeError, match="max_seqs"):
        LLM("anywhere", max_seqs=3)


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


def test_breaking_out_of_a_stream_frees_at_once(bare: LLM) -> None:
    for output in bare.stream([1, 2, 3], SamplingParams(max_tokens=300)):
        assert not output.finished
        break
    assert is_idle(bare)


def test_an_exception_in_the_loop_over_a_stream_frees(bare: LLM) -> None:
    def use() -> None:
        for _ in bare.stream([1, 2, 3], SamplingParams(max_tokens=300)):
            raise LookupError

    with pytest.raises(LookupError):
        use()
    assert is_idle(bare)


def test_a_stream_is_checked_when_it_is_asked_for(bare: LLM) -> None:
    with pytest.raises(ValueError, match="empty"):
        bare.stream([], GREEDY)


def test_streams_read_in_turns(bare: LLM) -> None:
    alone = [bare.generate([n, 5], GREEDY, use_tqdm=False)[0].outputs[0].token_ids for n in range(3)]
    streams = [bare.stream([n, 5], GREEDY) for n in range(3)]
    got: list[list[int]] = [[], [], []]
    for parts in zip_longest(*streams):  # what came while another stream was read comes in one piece
        for tokens, part in zip(got, parts, strict=True):
            tokens.extend(part.outputs[0].token_ids if part else [])
    assert got == alone
    assert is_idle(bare)


def test_generate_inside_a_stream(bare: LLM) -> None:
    wanted = bare.generate([9, 9], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    got: list[int] = []
    for part in bare.stream([9, 9], GREEDY):
        got += part.outputs[0].token_ids
        bare.generate([7], SamplingParams(max_tokens=2), use_tqdm=False)
    assert got == wanted


@pytest.mark.parametrize("call", ["generate", "stream"])
def test_ctrl_c_aborts_and_frees(bare: LLM, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = bare.engine.runner
    execute, calls = runner.execute, []

    def interrupted(plan):
        calls.append(plan)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return execute(plan)

    monkeypatch.setattr(runner, "execute", interrupted)
    params = SamplingParams(max_tokens=100)
    calls_of = {
        "generate": lambda: bare.generate([[1, 2], [3, 4]], params, use_tqdm=False),
        "stream": lambda: list(bare.stream([1, 2], params)),
    }
    with pytest.raises(KeyboardInterrupt):
        calls_of[call]()
    assert len(calls) == 3
    assert is_idle(bare)
    assert bare.generate([1, 2], GREEDY, use_tqdm=False)[0].finished


def test_several_threads_share_the_batch(bare: LLM) -> None:
    alone = [bare.generate([n, 6, 7], GREEDY, use_tqdm=False)[0].outputs[0].token_ids for n in range(6)]
    results: dict[int, list[int]] = {}

    def client(number: int) -> None:
        (output,) = bare.generate([number, 6, 7], GREEDY, use_tqdm=False)
        results[number] = output.outputs[0].token_ids

    threads = [threading.Thread(target=client, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[number] for number in range(6)] == alone


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


def test_closed_means_closed(tiny_folder: Path) -> None:
    with load(tiny_folder) as llm:
        stream = llm.stream([1, 2], SamplingParams(max_tokens=100))
        next(stream)
    llm.close()
    for use in (lambda: llm.generate([1]), lambda: llm.engine, llm.summary, lambda: next(stream)):
        with pytest.raises(RuntimeError, match="closed"):
            use()


def test_two_in_one_process(tiny_folder: Path) -> None:
    one, two = load(tiny_folder, block_size=4), load(tiny_folder, block_size=3)
    prompts = [random_tokens(9, seed=1), random_tokens(20, seed=2)]
    streams = [llm.stream(prompt, GREEDY) for llm in (one, two) for prompt in prompts]
    results: list[list[int]] = [[] for _ in streams]
    for parts in zip_longest(*streams):
        for tokens, part in zip(results, parts, strict=True):
            tokens.extend(part.outputs[0].token_ids if part else [])
    assert results[:2] == results[2:]
    assert one.engine.block_manager is not two.engine.block_manager


def test_a_journal_replays_to_the_same_tables(tiny_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with load(tiny_folder, kv_journal=path) as llm:
        llm.generate([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]], SamplingParams(n=2, max_tokens=6, seed=1), use_tqdm=False)
    header, *events = [json.loads(line) for line in path.read_text().splitlines()]
    assert header == {"num_blocks": 160, "block_size": 4}
    assert {"allocate", "share", "copy", "commit"} <= {event["kind"] for event in events}
    tables: dict[int, list[int]] = {}
    for event in events:
        if event["kind"] in ("allocate", "share", "copy"):
            table = tables.setdefault(event["sequence"], [])
            table[event["logical_index"] :] = [event["block"]]
    assert all(len(table) == -(-(5 + 6 - 1) // 4) for table in tables.values())
    assert [event["step"] for event in events] == sorted(event["step"] for event in events)
    assert events[-1]["step"] >= 5


def test_sizing(tiny_folder: Path) -> None:
    """An explicit num_blocks wins with one warning; a pool from memory lowers max_model_len; an explicit length is
    never lowered.
    """
    per_block = 2 * 2 * 2 * 32 * 4 * 16
    with pytest.warns(UserWarning, match="num_blocks = 8 holds requests of 129 tokens"):
        llm = LLM(tiny_folder, num_blocks=8)
    assert llm.engine.max_model_len == 512
    with pytest.raises(RequestTooLargeError, match="the pool has 8"):
        llm.generate([1] * 129, SamplingParams(max_tokens=1))
    with pytest.warns(UserWarning, match="max_model_len lowered from 512 to 161"):
        llm = LLM(tiny_folder, kv_cache_memory=10 * per_block)
    assert llm.engine.block_manager.num_physical_blocks == 10
    assert "lowered" in llm.summary()
    with pytest.raises(ValueError, match="raise kv_cache_memory or lower max_model_len"):
        LLM(tiny_folder, kv_cache_memory=10 * per_block, max_model_len=162)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        LLM(tiny_folder, kv_cache_memory=10 * per_block, max_model_len=161)
    with pytest.raises(ValueError, match="does not hold one block"):
        LLM(tiny_folder, kv_cache_memory=1)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("block_size", 0),
        ("num_blocks", -1),
        ("max_num_seqs", True),
        ("max_num_batched_tokens", 0),
        ("max_model_len", 513),
        ("gpu_memory_utilization", 1.5),
        ("scheduling_policy", "random"),
        ("eviction_policy", "mru"),
        ("threads", 0),
        ("backend", "cuda-magic"),
        ("dtype", "int3"),
    ],
)
def test_wrong_values_name_the_option(tiny_folder: Path, option: str, value: object) -> None:
    with pytest.raises(ValueError, match=option):
        LLM(tiny_folder, **{"num_blocks": 64, option: value})


def test_outputs_are_request_outputs(bare: LLM) -> None:
    (output,) = bare.generate([1, 2, 3], SamplingParams(n=2, max_tokens=2), use_tqdm=False)
    assert isinstance(output, RequestOutput)
    assert output.metrics.finished_time >= output.metrics.first_token_time >= output.metrics.arrival_time
    assert output.num_cached_tokens == 0
