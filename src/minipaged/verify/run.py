"""`verify_model`: compare a model folder with Hugging Face and return a `Report`."""

from __future__ import annotations

import platform
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from minipaged.kv.address import num_logical_blocks
from minipaged.model.checkpoint import Checkpoint
from minipaged.model.config import ModelConfig
from minipaged.model.qwen3 import Qwen3Model
from minipaged.model.weights import load_folder
from minipaged.ops.backend import Backend
from minipaged.ops.registry import get_backend
from minipaged.threads import set_threads
from minipaged.verify.decode import DecodeError, Setting, run
from minipaged.verify.determinism import check_determinism
from minipaged.verify.judge import (
    BFLOAT16_RATIO,
    LOGIT_TOLERANCE,
    NEAR_TIE_MARGIN,
    NOISE_FACTOR,
    ROUNDING,
    Bug,
    ErrorFigures,
    Report,
    TokenResult,
    judge_token,
    measure,
)
from minipaged.verify.layers import compare_layers
from minipaged.verify.oracle import GreedyPath, Trace, follow, greedy, hf_model, trace, transformers_version

TEXTS = (
    "ROMEO:\nHe jests at scars that never felt a wound.\nBut, soft! what light through yonder window breaks?\nIt",
    "The translation lookaside buffer keeps the most recent page table entries, so that",
)
RANDOM_PROMPT_TOKENS = (37, 21)  # not multiples of any usual block size


def verify_model(
    folder: Path,
    *,
    backend: str | None = None,
    dtype: str = "float32",
    device: str = "auto",
    block_size: int = 16,
    threads: int | None = None,
    num_tokens: int = 32,
    prompts: Sequence[Sequence[int]] | None = None,
    determinism: bool = False,
    seed: int = 0,
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Run every comparison on the model in `folder` (config.json and safetensors; a tokenizer is used if there is one).

    dtype: "float32" (each operation on Hugging Face's own inputs, `OP_TOLERANCE`) or "bfloat16" (our errors against
    Hugging Face in float32 at most `BFLOAT16_RATIO` times those of Hugging Face in bfloat16). num_tokens: greedy
    tokens per prompt. prompts: token ids; None = two texts, or two random prompts without a tokenizer. determinism:
    also compute the same tokens in other ways. progress: told what is being done.

    Whatever is wrong with the engine's results is in the report; exceptions are about the request: ValueError for
    another dtype, a prompt outside the vocabulary, or a context too short, and what loading raises.
    """
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"verify judges float32 and bfloat16, not dtype {dtype!r}")
    started = time.monotonic()
    # What our side refuses it refuses at once, not after minutes of Hugging Face.
    config = ModelConfig.from_folder(folder)
    Checkpoint(folder).check(config)
    kernels, device = choose_backend(backend, device)
    prompts, num_tokens = _fit(prompts, num_tokens, config, folder, seed)
    set_threads(threads)

    progress("Hugging Face, float32")
    with hf_model(folder, torch.float32) as hf:
        reference = trace(hf, prompts)
        paths = [greedy(hf, prompt, num_tokens) for prompt in prompts]
        shaken = [follow(hf, path, jitter=ROUNDING) for path in paths]
        noise = max(measure(other.logits, path.logits).max_relative for other, path in zip(shaken, paths, strict=True))
    peer: Trace | None = None
    peer_paths: list[GreedyPath] = []
    if dtype == "bfloat16":
        progress("Hugging Face, bfloat16")
        with hf_model(folder, torch.bfloat16) as hf:
            peer = trace(hf, prompts)
            peer_paths = [follow(hf, path) for path in paths]

    progress("loading the model")
    model = load_folder(folder, kernels, dtype=dtype, device=device, progress=False)
    report = Report(
        model=str(folder),
        backend=model.backend.name,
        dtype=dtype,
        num_layers=config.num_hidden_layers,
        block_size=block_size,
        prompts=[list(prompt) for prompt in prompts],
        logits_limit=max(LOGIT_TOLERANCE, NOISE_FACTOR * noise),
        machine=describe_machine(model),
        versions=describe_versions(),
    )
    progress("layer by layer")
    report.ops, report.prompt_logits = compare_layers(model, reference, block_size=block_size, peer=peer, seed=seed)
    report.other_bugs += _judge_prompt_logits(report.prompt_logits, report.logits_limit, reference, peer)
    progress("greedy tokens")
    try:
        limits = _bfloat16_limits(paths, peer_paths) if peer_paths else (NEAR_TIE_MARGIN, report.logits_limit)
        report.tokens = compare_tokens(model, paths, *limits, block_size=block_size, seed=seed)
        if determinism:
            progress("determinism")
            report.claims = check_determinism(model, folder, prompts, num_tokens, seed=seed)
    except DecodeError as error:
        report.other_bugs.append(Bug("token", str(error)))
    report.seconds = time.monotonic() - started
    return report


def choose_backend(name: str | None = None, device: str = "auto") -> tuple[Backend, str]:
    """The back end and the device: None or "auto" = the best one there is, "auto" = a GPU if there is one. Errors as
    `get_backend`.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return get_backend(None if name == "auto" else name, device), device


def compare_tokens(
    model: Qwen3Model,
    paths: Sequence[GreedyPath],
    margin_limit: float,
    error_limit: float,
    *,
    block_size: int,
    seed: int,
) -> list[TokenResult]:
    """All paths as one batch through the engine, blocks handed out in random order; `judge_token` for every token."""
    num_tokens = len(paths[0].tokens)
    blocks = 2 * sum(num_logical_blocks(len(path.prompt) + num_tokens, block_size) for path in paths)
    order = random.Random(seed).sample(range(blocks), blocks)
    setting = Setting(block_size=block_size, num_blocks=blocks, free_order=order, max_num_batched_tokens=24)
    scripts = {tuple(path.prompt): path.tokens for path in paths}
    outcome = run(model, list(scripts), num_tokens, setting=setting, scripts=scripts)

    return [
        judge_token(
            index,
            len(path.prompt) + step,
            path.logits[step],
            taken.logits,
            taken.token,
            margin_limit=margin_limit,
            error_limit=error_limit,
        )
        for index, path in enumerate(paths)
        for step, taken in enumerate(outcome.taken[tuple(path.prompt)])
    ]


def _bfloat16_limits(paths: Sequence[GreedyPath], peers: Sequence[GreedyPath]) -> tuple[float, float]:
    """(margin, relative error) for `judge_token` from Hugging Face's own errors in bfloat16 along the same tokens.

    An error of e moves the difference of two logits by up to 2 e, so a margin below twice the allowed error decides
    nothing.
    """
    errors = [measure(peer.logits, path.logits) for peer, path in zip(peers, paths, strict=True)]
    return (
        2 * BFLOAT16_RATIO * max(error.max_abs for error in errors),
        BFLOAT16_RATIO * max(error.max_relative for error in errors),
    )


def _judge_prompt_logits(ours: ErrorFigures, limit: float, reference: Trace, peer: Trace | None) -> list[Bug]:
    if peer is None:
        error = ours.max_relative
    else:
        error, limit = ours.rms, BFLOAT16_RATIO * measure(peer.logits, reference.logits).rms
    if error <= limit:
        return []
    return [Bug("logits", f"logits of the prompts through the whole model: error {error:.1e} above {limit:.1e}")]


def _fit(
    prompts: Sequence[Sequence[int]] | None, num_tokens: int, config: ModelConfig, folder: Path, seed: int
) -> tuple[list[list[int]], int]:
    """Prompts and number of tokens that the vocabulary and the context of the model allow."""
    context = config.max_context
    if prompts is None:
        longest = max(2, context // 2)
        chosen = _default_prompts(config, folder, seed)
        return [prompt[:longest] for prompt in chosen], max(1, min(num_tokens, context - longest))
    chosen = [list(prompt) for prompt in prompts]
    if not chosen or min(map(len, chosen)) < 2 or len(set(map(tuple, chosen))) < len(chosen):
        raise ValueError("verify needs at least one prompt, each different and of at least 2 tokens")
    wrong = [token for prompt in chosen for token in prompt if not 0 <= token < config.vocab_size]
    if wrong:
        raise ValueError(f"token id {wrong[0]} of a prompt is outside the vocabulary of {config.vocab_size}")
    longest = max(map(len, chosen))
    if longest + num_tokens > context:
        raise ValueError(
            f"a prompt of {longest} tokens and {num_tokens} new ones exceed the model's context of {context}"
        )
    return chosen, num_tokens


def _default_prompts(config: ModelConfig, folder: Path, seed: int) -> list[list[int]]:
    """Text where the model has a tokenizer, so that margins are those of real use; random ids where it has none."""
    if (folder / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        return [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]
    generator = random.Random(seed)
    return [[generator.randrange(config.vocab_size) for _ in range(length)] for length in RANDOM_PROMPT_TOKENS]


def describe_machine(model: Qwen3Model) -> dict[str, str]:
    """Where this ran, in words."""
    machine = {
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "processor": _processor(),
        "torch threads": str(torch.get_num_threads()),
        "device": str(model.device),
    }
    if model.device.type == "cuda":
        machine["gpu"] = torch.cuda.get_device_name(model.device)
    return machine


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def describe_versions() -> dict[str, str]:
    """Versions of what took part, by name."""
    import minipaged

    return {
        "minipaged": minipaged.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers_version(),
    }
