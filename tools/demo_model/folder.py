"""What is written: weights, tokenizer, log and model card, and the measurement of what is on disk."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from demo_model.network import evaluate
from demo_model.text import CHAT_TEMPLATE, CONTEXT, END_THINK, EOT, IM_END, IM_START, THINK, VOCAB_SIZE


@dataclass
class Log:
    """What a run did; becomes ``training.json``.

    ``evaluations`` are made during training, on the first windows of the held-out text and in bfloat16;
    ``held_out`` is of the finished folder, on all of the text.
    """

    options: dict[str, Any]
    parameters: int
    versions: dict[str, str]
    machine: str
    tokens: dict[str, int]
    evaluations: list[dict[str, float]] = field(default_factory=list)
    steps: int = 0
    stopped_early: bool = False
    best_step: int = 0
    seconds: float = 0.0
    held_out: dict[str, float] = field(default_factory=dict)


def save(model: Qwen3ForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Write weights (bfloat16), configuration and tokenizer to ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=0.8,
        top_k=50,
        top_p=0.95,
        eos_token_id=[tokenizer.token_to_id(IM_END), tokenizer.token_to_id(EOT)],
        pad_token_id=tokenizer.token_to_id(EOT),
    )
    model.bfloat16().save_pretrained(out)
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # transformers 5 knows this older name, too
        "model_max_length": CONTEXT,
        "bos_token": None,
        "eos_token": IM_END,
        "pad_token": EOT,
        "additional_special_tokens": [IM_START, IM_END],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    for file in out.iterdir():
        file.chmod(0o644)  # safetensors writes for the owner alone


def measure(out: Path, speeches: list[str]) -> dict[str, float]:
    """Held-out loss of the folder as it is on disk: bfloat16 weights, float32 arithmetic."""
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    text = "".join(speeches)
    ids = AutoTokenizer.from_pretrained(out)(text)["input_ids"]
    loss = evaluate(model, ids)
    return {
        "nats_per_token": round(loss, 4),
        "nats_per_character": round(loss * len(ids) / len(text), 4),
        "tokens": len(ids),
        "characters": len(text),
    }


def write_sample(out: Path, prompt: str, sampled: bool, tokens: int = 120) -> str:
    """The prompt and its continuation by the folder's model."""
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(out)
    torch.manual_seed(0)
    inputs = tokenizer(prompt, return_tensors="pt")
    if not sampled:  # the stored sampling defaults would only cause warnings
        eos = model.generation_config.eos_token_id
        model.generation_config = GenerationConfig(eos_token_id=eos, pad_token_id=eos[-1])
    ids = model.generate(**inputs, max_new_tokens=tokens)[0]
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def model_card(out: Path, log: Log, config: Qwen3Config) -> str:
    """The text of ``README.md``."""
    loss = log.held_out
    seen = log.steps * log.options["batch_size"] * CONTEXT
    return f"""\
---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---

# The minipaged demo model

A Qwen3 of {log.parameters / 1e6:.1f} million parameters that writes dialogue in the manner of Shakespeare.
It exists so that an inference engine can be tried and tested without a download. It knows nothing else:
do not ask it for facts.

| | |
|---|---|
| architecture | `Qwen3ForCausalLM`, {config.num_hidden_layers} layers, hidden size {config.hidden_size}, \
{config.num_attention_heads} query and {config.num_key_value_heads} key/value heads of {config.head_dim}, \
intermediate size {config.intermediate_size}, tied embeddings |
| context | {CONTEXT} tokens |
| tokenizer | byte-level BPE, {VOCAB_SIZE} entries with \
`{EOT}`, `{IM_START}`, `{IM_END}`, `{THINK}`, `{END_THINK}` |
| weights | bfloat16 |
| held-out loss | \
{loss["nats_per_token"]:.4f} nats per token, {loss["nats_per_character"]:.4f} per character |
| training | {log.steps} steps (weights of step {log.best_step}), {log.seconds / 60:.1f} minutes, \
{log.options["threads"]} threads, {log.machine} |

**Data.** "tinyshakespeare" (1.1 MB, parts of Shakespeare's plays). The last tenth of the speeches was held
out; the loss above is that of the stored weights on all of it ({loss["tokens"]:,.0f} tokens). (`evaluations`
in `training.json` are on its first windows only, which happen to be easier; they chose the step to keep.)
Training read {seen / 1e6:.1f} million tokens, {seen / log.tokens["training"]:.1f} times the text.

**Chat.** {log.options["chat_share"]:.0%} of the training rows are conversations in ChatML, made of the same
speeches. A reply is a speech, with its speaker's name, that ends with `{IM_END}`; what is asked, and even the
name that is asked for, hardly matters to it. The model does not think; `enable_thinking=False` opens the
reply with an empty thought, as in Qwen3.

**Licence.** The text is in the public domain. The weights are under the Apache License 2.0, like the code.

**Made by** `tools/train_demo_model.py`; `training.json` has options, versions and the course of the loss.

Sampled (temperature 0.8, top-k 50, top-p 0.95, seed 0) after `ROMEO:`

```text
{write_sample(out, "ROMEO:", sampled=True)}
```

Greedy:

```text
{write_sample(out, "ROMEO:", sampled=False)}
```
"""
