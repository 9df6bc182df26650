"""The training text: speeches, tokenizer, chat template, and rows drawn from them."""

from __future__ import annotations

import random

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

EOT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
THINK, END_THINK = "<think>", "</think>"
SPECIAL = [EOT, IM_START, IM_END]
NO_THOUGHT = f"{THINK}\n\n{END_THINK}\n\n"
VOCAB_SIZE = 1024
CONTEXT = 512
IGNORE = -100  # a label that does not count in the loss


# Qwen3's template in short: thoughts of earlier turns are dropped, `enable_thinking=False` opens the reply with an
# empty thought, tools stand in the system message (in fewer words: the context is short, and nobody taught the model
# to read them).
CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n' }}
    {%- endif %}
    {{- '<tools>\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson + '\\n' }}
    {%- endfor %}
    {{- '</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in (messages[1:] if tools and messages[0].role == 'system' else messages) %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'assistant' and '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content }}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n' if content or not loop.first }}
        {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
        {{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""


def split_text(text: str, held_out: float = 0.1) -> tuple[list[str], list[str]]:
    """Split ``text`` at blank lines into speeches; the last ``held_out`` share of them is for evaluation."""
    speeches = [speech.strip() + "\n\n" for speech in text.split("\n\n") if speech.strip()]
    cut = round(len(speeches) * (1 - held_out))
    if not 0 < cut < len(speeches):
        raise ValueError(f"the text has {len(speeches)} speeches: too few to hold out {held_out:.0%}")
    return speeches[:cut], speeches[cut:]


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE with ``VOCAB_SIZE`` entries, the special tokens last (as Qwen3 has them)."""
    tokenizer = Tokenizer(models.BPE())
    # GPT-2's pattern, not Qwen's: Qwen's glues line breaks to the punctuation before them (":\n"),
    # so that the prompt "ROMEO:" would end in a token that the training text does not have there.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL) - 2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([THINK, END_THINK])
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"the text gives {tokenizer.get_vocab_size()} tokens, wanted {VOCAB_SIZE}")
    return tokenizer


def chat_message(role: str, content: str) -> str:
    """One message as ``CHAT_TEMPLATE`` writes it."""
    return f"{IM_START}{role}\n{content}{IM_END}\n"


class RowSampler:
    """Draws training rows: ``(inputs, labels)`` of ``CONTEXT`` token ids each, labels shifted by one."""

    def __init__(self, speeches: list[str], tokenizer: Tokenizer, chat_share: float, seed: int) -> None:
        self.speeches = speeches
        self.tokenizer = tokenizer
        self.chat_share = chat_share
        self.random = random.Random(seed)
        self.encoded = [encoding.ids for encoding in tokenizer.encode_batch(speeches)]
        ids = tokenizer.get_vocab()
        self.eot, self.think, self.end_think = ids[EOT], ids[THINK], ids[END_THINK]

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        """``size`` fresh rows: inputs and labels, each ``[size, CONTEXT]``."""
        rows = torch.tensor([self._row() for _ in range(size)])  # [size, 2, CONTEXT + 1]
        return rows[:, 0, :-1], rows[:, 1, 1:]

    def _row(self) -> tuple[list[int], list[int]]:
        piece = self._chat if self.random.random() < self.chat_share else self._play
        ids: list[int] = []
        while len(ids) <= CONTEXT:
            ids += piece()
        ids = ids[: CONTEXT + 1]
        return ids, self._labels(ids)

    def _labels(self, ids: list[int]) -> list[int]:
        """The ids, without the empty thoughts: the model reads them, but must not learn to write them."""
        labels, thinking = [], False
        for token in ids:
            thinking = thinking or token == self.think
            labels.append(IGNORE if thinking else token)
            thinking = thinking and token != self.end_think
        return labels

    def _play(self) -> list[int]:
        """Consecutive speeches (30 in the mean), from the start or the inside of one, then the end mark."""
        start = self.random.randrange(len(self.encoded))
        count = 1 + int(self.random.expovariate(1 / 30))
        skipped = self.random.randrange(len(self.encoded[start])) if self.random.random() < 0.5 else 0
        ids = self.encoded[start][skipped:]
        for speech in self.encoded[start + 1 : start + count]:
            if len(ids) > CONTEXT:
                return ids  # longer than a row: the end mark would be cut off
            ids = ids + speech
        return [*ids, self.eot]

    def _chat(self) -> list[int]:
        """One to three exchanges; the user says a speech, or asks for a speaker."""
        start = self.random.randrange(1, len(self.speeches) - 6)
        text = chat_message("system", "You are a player in a play.") if self.random.random() < 0.2 else ""
        ask_by_name = self.random.random() < 0.4
        for turn in range(self.random.randint(1, 3)):
            said = self.speeches[start + 2 * turn].strip()
            reply = self.speeches[start + 2 * turn + 1].strip()
            name = reply.partition(":")[0]
            if ask_by_name:
                forms = ["{}", "{}:", "Speak as {}.", "What says {}?", "Let {} speak."]
                said = self.random.choice(forms).format(self.random.choice([name, name.title()]))
            elif self.random.random() < 0.7:
                said = said.partition(":\n")[2] or said
            if len(said) > 500 or len(reply) > 500:
                break
            thought = NO_THOUGHT if self.random.random() < 0.4 else ""
            text += chat_message("user", said) + chat_message("assistant", thought + reply)
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids
