"""An `LLM` on the tiny model, small enough to be checked after every step."""

from __future__ import annotations

from pathlib import Path

import torch

from minipaged import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def load(folder: Path, **options: object) -> LLM:
    options = {"block_size": 4, "num_blocks": 160, "max_model_len": 400, "check_invariants": True, **options}
    llm = LLM(folder, **options)
    torch.set_num_threads(1)
    return llm


def is_idle(llm: LLM) -> bool:
    stats = llm.engine.stats()
    return stats.blocks_free + stats.blocks_idle == stats.blocks_total and not llm.engine.has_unfinished()
