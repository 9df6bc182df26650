"""The progress bar of `LLM.generate`."""

from __future__ import annotations

from tqdm import tqdm

from minipaged.outputs import RequestOutput


class ProgressBar:
    """A bar over prompts on stderr, with the rate in tokens; use it as a context manager."""

    def __init__(self, total: int) -> None:
        self._bar = tqdm(total=total, desc="Prompts", unit="prompt", dynamic_ncols=True)
        self._prompt_tokens = self._output_tokens = 0

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def update(self, output: RequestOutput) -> None:
        """One more prompt is done."""
        self._prompt_tokens += len(output.prompt_token_ids)
        self._output_tokens += sum(len(completion.token_ids) for completion in output.outputs)
        elapsed = max(self._bar.format_dict["elapsed"], 1e-9)
        self._bar.set_postfix_str(
            f"in {self._prompt_tokens / elapsed:.0f} tok/s, out {self._output_tokens / elapsed:.0f} tok/s",
            refresh=False,
        )
        self._bar.update()
