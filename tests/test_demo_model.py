"""The bundled model: complete, small, loadable by plain transformers, and able to write."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

FOLDER = Path(__file__).resolve().parents[1] / "src" / "minipaged" / "demo_model"
FILES = {
    "README.md",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "training.json",
}
MAX_BYTES = 12_000_000
SPECIAL = {"<|endoftext|>": 1019, "<|im_start|>": 1020, "<|im_end|>": 1021}

# The Tempest, II 1: from the last tenth of the corpus, which the training did not see.
HELD_OUT = """\
GONZALO:
I would with such perfection govern, sir,
To excel the golden age.

SEBASTIAN:
God save his majesty!

ANTONIO:
Long live Gonzalo!

GONZALO:
And,--do you mark me, sir?

ALONSO:
Prithee, no more: thou dost talk nothing to me.

GONZALO:
I do well believe your highness; and
did it to minister occasion to these gentlemen,
who are of such sensible and nimble lungs that
they always use to laugh at nothing.

ANTONIO:
'Twas you we laughed at.

GONZALO:
Who in this kind of merry fooling am nothing
to you: so you may continue and laugh at
nothing still.

ANTONIO:
What a blow was there given!

GONZALO:
You are gentlemen of brave metal; you would lift
the moon out of her sphere, if she would continue
in it five weeks without changing.

ANTONIO:
Nay, good my lord, be not angry.

ALONSO:
What, all so soon asleep! I wish mine eyes
Would, with themselves, shut up my thoughts: I find
They are inclined to do so.

SEBASTIAN:
Please you, sir,
Do not omit the heavy offer of it:
It seldom visits sorrow; when it doth,
It is a comforter.
"""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a model gains nothing from more, and loses much on a busy machine
    yield AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32, local_files_only=True).eval()
    torch.set_num_threads(threads)


def read_json(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    return content


def complete(model: Any, tokenizer: Any, prompt: str, tokens: int, **choice: Any) -> tuple[list[int], str]:
    """The ids and the text that the model adds to ``prompt``."""
    inputs = tokenizer(prompt, return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=tokens, **choice)[0, inputs["input_ids"].shape[1] :]
    return ids.tolist(), tokenizer.decode(ids, skip_special_tokens=True)


# --- the folder ---------------------------------------------------------------------------------


def test_folder_is_complete_and_small() -> None:
    files = {file.name: file for file in FOLDER.iterdir()}
    assert set(files) == FILES
    assert sum(file.stat().st_size for file in files.values()) <= MAX_BYTES


def test_no_file_names_the_machine_it_was_made_on() -> None:
    local = re.compile(r"/(?:work|home|root|tmp|usr|opt|mnt)/|https?://|_name_or_path")
    for name in sorted(FILES - {"model.safetensors", "tokenizer.json"}):
        found = local.search((FOLDER / name).read_text(encoding="utf-8"))
        assert found is None, f"{name}: {found}"


def test_weights_are_bfloat16_and_as_many_as_the_log_says() -> None:
    with safe_open(FOLDER / "model.safetensors", "pt") as weights:  # type: ignore[no-untyped-call]
        tensors = [weights.get_tensor(name) for name in weights.keys()]  # noqa: SIM118 - not a mapping
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
    assert all(tensor.isfinite().all() for tensor in tensors)
    count = sum(tensor.numel() for tensor in tensors)
    assert count == read_json("training.json")["parameters"]
    assert 3_000_000 <= count <= 6_000_000


def test_config_is_a_qwen3_with_grouped_query_attention() -> None:
    config = read_json("config.json")
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    assert config["head_dim"] != config["hidden_size"] // config["num_attention_heads"]
    assert config["tie_word_embeddings"] is True
    assert config["max_position_embeddings"] == 512


def test_generation_stops_at_either_end_mark() -> None:
    config = read_json("generation_config.json")
    assert config["eos_token_id"] == [SPECIAL["<|im_end|>"], SPECIAL["<|endoftext|>"]]
    assert (config["temperature"], config["top_k"], config["top_p"]) == (0.8, 50, 0.95)


def test_card_states_the_logged_loss() -> None:
    loss = read_json("training.json")["held_out"]["nats_per_token"]
    assert f"{loss:.4f} nats per token" in (FOLDER / "README.md").read_text(encoding="utf-8")


# --- the tokenizer ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "ROMEO:\nBut, soft! what light through yonder window breaks?\n\nJULIET:\nAy me!\n",
        "  two  spaces,\ttabs\r\nand trailing blanks  \n\n\n",
        "但是,轻声!那边窗子里亮起来的是什么光?",
        "👩‍🚀🎭 emoji, e\u0301 decomposed and \u00e9 composed",
        "x = [1, 23, 456]; print(f'{x!r}')",
        "\x00\x7f\u200b\ufeff",
    ],
)
def test_tokenizer_round_trips(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    assert all(0 <= token < 1024 for token in ids)
    assert tokenizer.decode(ids) == text


def test_special_tokens_have_their_ids_and_are_skipped(tokenizer: Any) -> None:
    assert len(tokenizer) == read_json("config.json")["vocab_size"] == 1024
    for token, number in SPECIAL.items():
        assert tokenizer(token)["input_ids"] == [number]
        assert tokenizer.decode([number], skip_special_tokens=True) == ""
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == (
        "<|im_end|>",
        "<|endoftext|>",
        None,
    )
    assert tokenizer("<think>")["input_ids"] == [1022]
    assert tokenizer("</think>")["input_ids"] == [1023]


def test_line_breaks_are_not_merged_with_the_colon_before_them(tokenizer: Any) -> None:
    prompt = tokenizer("ROMEO:")["input_ids"]
    assert tokenizer("ROMEO:\nO, she doth teach")["input_ids"][: len(prompt)] == prompt


def test_chat_template(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Who are you?"},
        {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nROMEO:\nI am not here."},
        {"role": "user", "content": "你好"},
    ]

    def render(**options: Any) -> str:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, **options)
        return text

    history = (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nWho are you?<|im_end|>\n"
        "<|im_start|>assistant\nROMEO:\nI am not here.<|im_end|>\n"
        "<|im_start|>user\n你好<|im_end|>\n"
    )
    opening = "<|im_start|>assistant\n"
    assert render() == history
    assert render(add_generation_prompt=True) == history + opening
    assert render(add_generation_prompt=True, enable_thinking=True) == history + opening
    assert render(add_generation_prompt=True, enable_thinking=False) == history + opening + "<think>\n\n</think>\n\n"


# --- what it writes -----------------------------------------------------------------------------


def test_held_out_loss(model: Any, tokenizer: Any) -> None:
    ids = tokenizer(HELD_OUT, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logits = model(ids).logits[0, :-1]
    loss = F.cross_entropy(logits, ids[0, 1:]).item()
    # 4.05 when the model was made; a guard against damaged weights or tokenizer, not a mark of quality.
    assert loss < 4.3, f"{loss:.3f} nats per token; a uniform guess has {math.log(1024):.3f}"


def test_greedy_continuation_of_romeo_has_lines(model: Any, tokenizer: Any) -> None:
    _, text = complete(model, tokenizer, "ROMEO:", 60, do_sample=False, temperature=1, top_k=50, top_p=1)
    lines = text.splitlines()
    assert lines[0] == ""  # the name stands alone in its line
    assert len(lines) >= 3
    assert sum(character.isalpha() or character == " " for character in text) > 0.8 * len(text)


def test_sampled_continuation_of_romeo_is_a_dialogue(model: Any, tokenizer: Any) -> None:
    torch.manual_seed(3)
    _, text = complete(model, tokenizer, "ROMEO:", 120)
    assert re.search(r"(?m)^[A-Z][A-Za-z ]+:\n\S", text), f"no second speech in {text!r}"


@pytest.mark.parametrize("thinking", [True, False])
def test_chat_replies_end(model: Any, tokenizer: Any, thinking: bool) -> None:
    torch.manual_seed(3)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Speak as Romeo."}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=thinking,
    )
    ids, text = complete(model, tokenizer, prompt, 200)
    assert ids[-1] == SPECIAL["<|im_end|>"], f"no end in {text!r}"
    assert "<think>" not in text
