"""Options that several commands share: every keyword of `LLM`, every sampling field, as tables of data.

A command takes `llm: dict` and, if it samples, `sampling: dict`; the decorators here replace those two parameters by
one flag per row, so that a flag is described once and has the name of the keyword it sets.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from typing import Annotated, Any, TypeVar

import typer

from minipaged.errors import CheckpointError, PoolSizeWarning, UnsupportedModelError
from minipaged.llm.options import EngineOptions
from minipaged.ops.registry import backend_names

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Flag:
    """One command-line flag: the keyword it sets, its type, its default (None = not given), help, least value, unit."""

    name: str
    type: Any
    default: Any
    help: str
    min: int | None = None
    unit: str = ""  # of a number, for the error: "a number of bytes, for example 1073741824"

    def parameter(self, panel: str | None) -> inspect.Parameter:
        """The Typer parameter, in this panel of --help; underscores become dashes."""
        flag = "--" + self.name.replace("_", "-")
        decl = f"{flag}/--no-{flag[2:]}" if self.type is bool else flag
        kind = self.type if self.type is bool or self.default is not None else self.type | None
        if self.type in (int, float):
            metavar = f"<{self.type.__name__}>"  # as Typer writes it; from a parser it would take the function's name
            option = typer.Option(decl, help=self.help, parser=self.number, metavar=metavar, rich_help_panel=panel)
        else:
            option = typer.Option(decl, help=self.help, rich_help_panel=panel)
        return inspect.Parameter(
            self.name, inspect.Parameter.KEYWORD_ONLY, default=self.default, annotation=Annotated[kind, option]
        )

    def number(self, given: str | int | float) -> int | float:
        """What was typed (or the default) as a number; if it is none, a usage error with the value and the unit."""
        unit = self.unit or ("a whole number" if self.type is int else "a number")
        try:
            number: int | float = self.type(given)
        except (ValueError, OverflowError):
            raise typer.BadParameter(f"got {given!r}; {unit}") from None
        if self.min is not None and number < self.min:
            raise typer.BadParameter(f"got {given!r}; {unit}, at least {self.min}")
        return number


_DEFAULTS = {field.name: field.default for field in fields(EngineOptions)}


def _llm_flag(name: str, kind: type, text: str, *, unit: str = "") -> Flag:
    """The flag of a keyword of `LLM`, with that keyword's default."""
    return Flag(name, kind, _DEFAULTS[name], text, unit=unit)


LLM_FLAGS = (
    _llm_flag("tokenizer", str, "Folder of the tokenizer, if it is not the model's."),
    _llm_flag("revision", str, "Branch, tag or commit of a Hub model."),
    _llm_flag("dtype", str, "auto, float32, bfloat16 or float16."),
    _llm_flag("device", str, "auto, cpu or cuda."),
    _llm_flag("backend", str, f"Kernels: {', '.join(backend_names())}; the best that runs by default."),
    _llm_flag("block_size", int, "Tokens per KV block.", unit="a number of tokens, for example 16"),
    _llm_flag(
        "num_blocks",
        int,
        "KV blocks in the pool; sized from memory by default.",
        unit="a number of KV blocks, for example 1024",
    ),
    _llm_flag("kv_cache_memory", int, "Bytes for the KV pool.", unit="a number of bytes, for example 1073741824"),
    _llm_flag(
        "gpu_memory_utilization",
        float,
        "Share of the GPU's memory to use.",
        unit="a share above 0 and at most 1, for example 0.9",
    ),
    _llm_flag(
        "max_model_len",
        int,
        "Longest sequence (prompt + output) in tokens.",
        unit="a number of tokens, for example 4096",
    ),
    _llm_flag("max_num_seqs", int, "Sequences that may hold blocks at once.", unit="a number of sequences"),
    _llm_flag(
        "max_num_batched_tokens",
        int,
        "Token budget of one step (512 on the CPU, 8192 on a GPU).",
        unit="a number of tokens, for example 512",
    ),
    _llm_flag("enable_prefix_caching", bool, "Keep full blocks findable for later prompts."),
    _llm_flag("eviction_policy", str, "Which idle cached block goes first: lru or lfu."),
    _llm_flag("scheduling_policy", str, "Who runs first: fcfs or priority."),
    _llm_flag("seed", int, "Random seed."),
    _llm_flag(
        "threads",
        int,
        "Compute threads; min(affinity, cgroup quota) by default.",
        unit="a number of threads, for example 4",
    ),
    _llm_flag("check_invariants", bool, "Check the block manager after every step (slow)."),
    _llm_flag("kv_journal", str, "Write the block manager's events to this file."),
)

SAMPLING_FLAGS = (
    Flag("n", int, 1, "Outputs per prompt.", unit="a number of outputs, for example 2"),
    Flag(
        "temperature",
        float,
        None,
        "0 = greedy; the model's own default if not given.",
        unit="a number, for example 0.7",
    ),
    Flag(
        "top_p",
        float,
        None,
        "Nucleus sampling: smallest set of tokens with this probability.",
        unit="a probability above 0 and at most 1, for example 0.95",
    ),
    Flag("top_k", int, None, "Keep the k most likely tokens; 0 = all.", unit="a number of tokens, for example 20"),
    Flag(
        "min_p",
        float,
        0.0,
        "Drop tokens below this share of the most likely one.",
        unit="a share from 0 to 1, for example 0.05",
    ),
    Flag(
        "max_tokens",
        int,
        None,
        "Most tokens to generate; as many as fit if not given.",
        unit="a number of tokens, for example 100",
    ),
    Flag("min_tokens", int, 0, "Fewest tokens to generate.", unit="a number of tokens, for example 10"),
    Flag("stop", list[str], None, "Stop at this text (may be repeated)."),
    Flag("ignore_eos", bool, False, "Go on after an end-of-sequence token."),
    Flag("presence_penalty", float, 0.0, "Subtracted once from a token that has been generated."),
    Flag("frequency_penalty", float, 0.0, "Subtracted for each time a token has been generated."),
    Flag("repetition_penalty", float, None, "Divides the positive logit of a token seen before."),
)

PANELS = {"llm": "Model and engine", "sampling": "Sampling", "bench": "Benchmark", "work": "Workload"}

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")

COMMON_FLAGS = (
    Flag("log_level", str, "warning", "debug, info, warning or error."),
    Flag("debug", bool, False, "Show the traceback of an error."),
)


def with_flags(**groups: tuple[Flag, ...]) -> Callable[[F], F]:
    """Replace each named dict parameter of a command by the flags of its group; adds the common flags.

    Sets up logging and turns exceptions into a line on stderr and exit status 1 (2 where the input was wrong).
    """

    def decorate(command: F) -> F:
        own = inspect.signature(command, eval_str=True)
        kept = [p for p in own.parameters.values() if p.name not in groups]
        flags = [f.parameter(PANELS[name]) for name, group in groups.items() for f in group]
        flags += [f.parameter(None) for f in COMMON_FLAGS]

        @functools.wraps(command)
        def run(**given: Any) -> None:
            warnings.showwarning = lambda message, *_: typer.echo(
                f"warning: {message}", err=True
            )  # a line, not a source
            dicts = {name: {f.name: given.pop(f.name) for f in group} for name, group in groups.items()}
            level = given.pop("log_level").upper()
            with readable_errors(debug=given.pop("debug")):
                with usage_errors():
                    if level not in LOG_LEVELS:
                        raise ValueError(f"log level {level.lower()!r} is unknown: debug, info, warning or error")
                    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
                command(**given, **dicts)

        parameters = [*kept, *flags]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        del run.__wrapped__  # Typer would look through it at the undecorated signature
        return run  # type: ignore[return-value]

    return decorate


@contextmanager
def summarised(wanted: bool = True) -> Iterator[None]:
    """For loading an engine whose summary is shown afterwards: what it says about the pool is no warning as well.

    wanted False: there will be no summary.
    """
    with warnings.catch_warnings():
        if wanted:
            warnings.simplefilter("ignore", PoolSizeWarning)
        yield


def show_summary(summary: str) -> None:
    """The start-up summary on stderr, unless the log has it already (`--log-level info`)."""
    if not logging.getLogger("minipaged.llm.loading").isEnabledFor(logging.INFO):
        typer.echo(summary, err=True)


class UsageError(ValueError):
    """What the user asked for makes no sense: exit status 2."""


@contextmanager
def usage_errors() -> Iterator[None]:
    """A ValueError in here is the caller's: wrong usage. A broken or unsupported checkpoint is not."""
    try:
        yield
    except (CheckpointError, UnsupportedModelError):
        raise
    except ValueError as error:
        raise UsageError(str(error)) from error


@contextmanager
def readable_errors(*, debug: bool) -> Iterator[None]:
    """One line for an error, and the exit status that belongs to it."""
    try:
        yield
    except BrokenPipeError:  # the reader has seen enough (`| head`): nothing to say, and nobody to say it to
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still buffered, at exit
        raise typer.Exit(1) from None
    except typer.Exit:  # a RuntimeError, but no error: a command's own exit status
        raise
    except (ValueError, RuntimeError, OSError, MemoryError, ImportError, TypeError) as error:
        if debug:
            raise
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2 if isinstance(error, UsageError) else 1) from error
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        raise typer.Exit(130) from None
