"""`minipaged generate`: text from prompts, and a drawing of the blocks that held it."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minipaged.cli.options import LLM_FLAGS, SAMPLING_FLAGS, show_summary, summarised, usage_errors, with_flags

if TYPE_CHECKING:
    from minipaged.cli.blocks_view import PoolSnapshot
    from minipaged.llm.llm import LLM
    from minipaged.outputs import RequestOutput

EXAMPLE = 'Example:  minipaged generate "ROMEO:" --max-tokens 100'


@with_flags(llm=LLM_FLAGS, sampling=SAMPLING_FLAGS)
def generate(
    llm: dict[str, Any],
    sampling: dict[str, Any],
    prompts: Annotated[list[str], typer.Argument(help="One or more prompts; they run together.")],
    model: Annotated[str | None, typer.Option(help="Folder or Hub id; the bundled demo model if not given.")] = None,
    show_blocks: Annotated[bool, typer.Option("--show-blocks", help="Draw the block pool when it is fullest.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Continue PROMPTS with a Qwen3 model and stream the text."""
    from minipaged import LLM, SamplingParams

    if model is None:
        _warn_of_models(prompts)
    with usage_errors():
        if not all(prompts):
            raise ValueError("an empty prompt has nothing to continue; give at least one character")
        params = SamplingParams(**{k: v for k, v in sampling.items() if v is not None})
        with summarised(not as_json):
            engine_owner = LLM(model, **llm)
    with engine_owner:
        if not as_json:
            show_summary(engine_owner.summary())
        session = _Session(engine_owner, keep_snapshots=show_blocks)
        started = time.perf_counter()
        with usage_errors():
            requests = session.submit(prompts, params)
        streamed = not as_json and len(prompts) == 1 and params.n == 1
        outputs = session.run(requests, on_text=_write if streamed else None)
        seconds = time.perf_counter() - started
        if as_json:
            typer.echo(json.dumps(_as_json(outputs, session, seconds), ensure_ascii=False))
        else:
            _print_outputs(outputs, streamed=streamed)
            _print_totals(outputs, session, seconds, engine_owner)
            if show_blocks and session.fullest is not None:
                from minipaged.cli.blocks_view import print_pool

                print_pool(session.fullest)
    if session.interrupted:
        raise KeyboardInterrupt  # after what there is has been shown
    if any(c.finish_reason == "error" for out in outputs for c in out.outputs):
        raise typer.Exit(1)


def _warn_of_models(prompts: list[str]) -> None:
    """The other commands take MODEL where this one takes PROMPTS: say so if a prompt looks like a model."""
    for prompt in prompts:
        hub_id = re.fullmatch(r"[\w.-]+/[\w.-]+", prompt, re.ASCII)
        if hub_id or ("\0" not in prompt and len(prompt) < 4096 and _is_model_folder(prompt)):
            typer.echo(
                f"warning: {prompt!r} looks like a model, but is taken as a prompt for the demo model; "
                f"to run that model: --model {prompt}",
                err=True,
            )


def _is_model_folder(name: str) -> bool:
    try:
        return (Path(name).expanduser() / "config.json").is_file()
    except (OSError, RuntimeError):  # longer than a file name may be, or `~` of a user that is not there: a text
        return False


class _Session:
    """Drives `Engine.step` by hand, to see the blocks between steps; aborts everything if the user interrupts."""

    def __init__(self, llm: LLM, *, keep_snapshots: bool) -> None:
        self.llm = llm
        self.keep_snapshots = keep_snapshots
        self.blocks_used = 0
        self.interrupted = False
        self.fullest: PoolSnapshot | None = None

    def submit(self, prompts: list[str], params: Any) -> list[str]:
        ids = [f"prompt-{i}" for i in range(len(prompts))]
        for request_id, prompt in zip(ids, prompts, strict=True):
            self.llm.engine.add_request(request_id, prompt, params)
        return ids

    def run(self, requests: list[str], on_text: Any = None) -> list[RequestOutput]:
        engine, latest, shown = self.llm.engine, dict[str, Any](), 0
        try:
            while engine.has_unfinished():
                for out in engine.step():
                    latest[out.request_id] = out
                    if on_text is not None:
                        on_text(out.outputs[0].text[shown:])
                        shown = len(out.outputs[0].text)
                self._look()
        except KeyboardInterrupt:
            self.interrupted = True
            for request_id in requests:
                engine.abort(request_id)
            for out in engine.step():
                latest[out.request_id] = out
        return [latest[r] for r in requests if r in latest]

    def _look(self) -> None:
        in_use = self.llm.engine.stats().blocks_in_use
        self.blocks_used = max(self.blocks_used, in_use)
        if self.keep_snapshots and in_use >= (self.fullest.blocks_in_use if self.fullest else 1):
            from minipaged.cli.blocks_view import PoolSnapshot

            self.fullest = PoolSnapshot.of(self.llm.engine.block_manager)


def _write(text: str) -> None:
    typer.echo(text, nl=False)  # it writes UTF-8 where the locale says ASCII, and nothing where stdout is closed


def _print_outputs(outputs: list[RequestOutput], *, streamed: bool) -> None:
    if streamed:
        typer.echo()
    else:
        for out in outputs:
            for completion in out.outputs:
                label = f"[{out.prompt!r}" + (f" #{completion.index}]" if len(out.outputs) > 1 else "]")
                typer.echo(f"{label}\n{completion.text}\n")
    for out in outputs:
        for completion in out.outputs:
            if completion.finish_reason == "error":
                typer.echo(f"error: {out.request_id}: {completion.error}", err=True)


def _counts(outputs: list[RequestOutput]) -> tuple[int, int]:
    generated = sum(len(c.token_ids) for out in outputs for c in out.outputs)
    return sum(len(out.prompt_token_ids) for out in outputs), generated


def _print_totals(outputs: list[RequestOutput], session: _Session, seconds: float, llm: LLM) -> None:
    prompt_tokens, generated = _counts(outputs)
    total = llm.engine.stats().blocks_total
    typer.echo(
        f"{prompt_tokens} prompt + {generated} generated tokens, {generated / seconds:.1f} tok/s, "
        f"{session.blocks_used} of {total} blocks used ({llm.engine.block_manager.block_size} tokens each)",
        err=True,
    )


def _as_json(outputs: list[RequestOutput], session: _Session, seconds: float) -> dict[str, Any]:
    prompt_tokens, generated = _counts(outputs)
    return {
        "outputs": [
            {
                "prompt": out.prompt,
                "prompt_tokens": len(out.prompt_token_ids),
                "cached_tokens": out.num_cached_tokens,
                "completions": [
                    {
                        "index": c.index,
                        "text": c.text,
                        "token_ids": list(c.token_ids),
                        "finish_reason": c.finish_reason,
                        "error": c.error,
                    }
                    for c in out.outputs
                ],
            }
            for out in outputs
        ],
        "prompt_tokens": prompt_tokens,
        "generated_tokens": generated,
        "tok_s": generated / seconds,
        "blocks_used": session.blocks_used,
    }
