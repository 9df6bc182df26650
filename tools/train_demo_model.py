"""Train the demo model that ships with minipaged: a small Qwen3 that writes Shakespearean dialogue.

    OMP_WAIT_POLICY=PASSIVE nice python tools/train_demo_model.py --text tinyshakespeare.txt

(Where others work on the same cores, threads that spin while they wait cost most of the speed: hence the
variable.)

The text is split into speeches ("NAME:" and the lines below it); the last tenth of them is held out. Every
training row of 512 tokens is drawn afresh: stretches of the play, ended now and then by
``<|endoftext|>``, or (one row in five) ChatML conversations in which the assistant answers with the
next speech, so that ``chat`` ends its turns with ``<|im_end|>``.

The learning rate follows the share of the budget that is spent, whichever of ``--minutes`` and
``--steps`` is nearer to its end, so that it always comes down to zero. With ``--steps`` alone (a large
``--minutes``) a run does not depend on the speed of the machine.

The folder written loads in plain ``transformers``; its ``training.json`` is the log of the run.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import tokenizers
import torch
import transformers
from torch import nn
from tqdm import tqdm
from transformers import Qwen3ForCausalLM

from demo_model.folder import Log, measure, model_card, save
from demo_model.network import add_dropout, evaluate, make_config, make_optimizers, token_loss
from demo_model.text import RowSampler, split_text, train_tokenizer

DEFAULT_OUT = Path(__file__).resolve().parents[1] / "src" / "minipaged" / "demo_model"


@dataclass(frozen=True)
class Options:
    """Everything that decides the outcome of a run, apart from the text and the machine's speed."""

    minutes: float = 25.0
    steps: int = 100_000
    seed: int = 1234
    threads: int = 2
    batch_size: int = 4
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    dropout: float = 0.1
    chat_share: float = 0.2
    warmup: float = 0.03
    eval_every: int = 150
    patience: int = 4


def learning_rate_factor(progress: float, warmup: float) -> float:
    """Linear warm-up, flat until 40 % of the budget, then a cosine to zero; ``progress`` in 0..1."""
    if progress < warmup:
        return (progress + 1e-3) / (warmup + 1e-3)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, max(0.0, progress - 0.4) / 0.6)))


def budget(options: Options, clock: Callable[[], float] = time.monotonic) -> Iterator[tuple[int, float]]:
    """Yield ``(step, share of the budget spent)`` until either time or steps are used up."""
    begin, step = clock(), 0
    while True:
        progress = max(step / options.steps, (clock() - begin) / (60 * options.minutes))
        if progress >= 1:
            return
        yield step, progress
        step += 1


def train(model: Qwen3ForCausalLM, sampler: RowSampler, held_out: list[int], options: Options, log: Log) -> None:
    """Train ``model`` in place and leave it at its best evaluation."""
    add_dropout(model, options.dropout)
    optimizers = make_optimizers(model, options.learning_rate, options.weight_decay)
    best_loss, best_state, mean = math.inf, model.state_dict(), math.nan
    begin = time.monotonic()
    model.train()

    def check(step: int) -> bool:
        """Evaluate, keep the best weights; True when there was no progress for ``patience`` checks."""
        nonlocal best_loss, best_state
        with torch.autocast("cpu", torch.bfloat16):
            loss = evaluate(model, held_out, windows=20)
        seconds = round(time.monotonic() - begin, 1)
        log.evaluations.append(
            {"step": step, "train_loss": round(mean, 4), "held_out_loss": round(loss, 4), "seconds": seconds}
        )
        bar.write(f"step {step}: train {mean:.4f}, held-out {loss:.4f}, {seconds:.0f} s")
        if loss < best_loss:
            best_loss, log.best_step = loss, step
            best_state = {name: value.clone() for name, value in model.state_dict().items()}
        return step - log.best_step >= options.patience * options.eval_every

    with tqdm(total=100, unit="%", bar_format="{l_bar}{bar}| {elapsed} {postfix}") as bar:
        for step, progress in budget(options):
            factor = learning_rate_factor(progress, options.warmup)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = options.learning_rate * factor
            inputs, labels = sampler.batch(options.batch_size)
            with torch.autocast("cpu", torch.bfloat16):
                loss = token_loss(model, inputs, labels)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            log.steps = step + 1
            mean = loss.item() if math.isnan(mean) else 0.98 * mean + 0.02 * loss.item()
            bar.update(100 * progress - bar.n)
            bar.set_postfix_str(f"step {log.steps} loss {mean:.3f} lr x{factor:.2f}")
            if log.steps % options.eval_every == 0 and check(log.steps):
                log.stopped_early = True
                break
        else:
            check(log.steps)
    log.seconds = round(time.monotonic() - begin, 1)
    model.load_state_dict(best_state)


def machine_name() -> str:
    """The processor's model name, or whatever ``platform`` knows."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def parse_arguments() -> tuple[Path, Path, Options]:
    """The text, the folder to write, and the options, each of which is a flag."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--text", type=Path, required=True, metavar="FILE", help="the training text (UTF-8)")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, metavar="DIR", help="the folder to write")
    for name, value in asdict(Options()).items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=type(value), default=value, help="default: %(default)s")
    values = vars(parser.parse_args())
    return values.pop("text"), values.pop("out"), Options(**values)


def main() -> None:
    """Text to tokenizer to network to folder."""
    text_file, out, options = parse_arguments()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)

    speeches, held_out = split_text(text_file.read_text(encoding="utf-8"))
    tokenizer = train_tokenizer(speeches)
    sampler = RowSampler(speeches, tokenizer, options.chat_share, options.seed)
    held_out_ids = tokenizer.encode("".join(held_out)).ids
    config = make_config(tokenizer)
    model = Qwen3ForCausalLM(config)
    log = Log(
        options=asdict(options),
        parameters=sum(p.numel() for p in model.parameters()),
        versions={
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
        machine=machine_name(),
        tokens={"training": sum(map(len, sampler.encoded)), "held_out": len(held_out_ids)},
    )
    print(f"{log.parameters:,} parameters, tokens: {log.tokens}")

    train(model, sampler, held_out_ids, options, log)
    save(model, tokenizer, out)
    log.held_out = measure(out, held_out)
    (out / "training.json").write_text(json.dumps(asdict(log), indent=2) + "\n", encoding="utf-8")
    (out / "README.md").write_text(model_card(out, log, config), encoding="utf-8")
    print((out / "README.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
