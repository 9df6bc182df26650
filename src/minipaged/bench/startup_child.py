"""The process whose start `startup` measures: it loads a model, generates two tokens, and prints a mark at each stage.

A mark is one line of JSON: its name, the monotonic clock (which the parent reads too), and what is known then.
"""

import json
import sys
import time
from typing import Any


def mark(name: str, **facts: Any) -> None:
    """Print one mark at once."""
    print(json.dumps({"mark": name, "time": time.monotonic(), **facts}), flush=True)


def main(model: str, options: dict[str, Any]) -> None:
    """Start as a user's program does: torch, then `LLM`, then a request. SystemExit with the reason if it fails."""
    mark("python")
    import torch

    mark("torch")
    from minipaged import LLM, SamplingParams

    mark("minipaged")
    with LLM(model, **options) as llm:
        loaded = llm.loaded
        mark(
            "ready",
            backend=loaded.model.backend.name,
            dtype=str(loaded.model.activation_dtype).removeprefix("torch."),
            threads=torch.get_num_threads(),
            device=str(loaded.model.device),
            pool_bytes=sum(cache.nbytes for cache in loaded.caches),
        )
        params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, detokenize=False)
        for output in llm.stream([1, 2, 3, 4], params):
            if output.outputs[0].finish_reason == "error":
                raise SystemExit(output.outputs[0].error)
            mark("end" if output.finished else "token")


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
