"""After a step that never came to its end (Ctrl-C, an error of the engine's own): what a request is, from its tokens.

Tokens are appended first and never changed, and every draw is a function of seed, child and position: whatever else was
half done follows from them, and what is computed again is the same.
"""

from __future__ import annotations

from itertools import repeat

from minipaged.engine.plan import SampledToken
from minipaged.engine.request import Request, Sequence, Status


def restart(request: Request) -> None:
    """Make its sequences consistent, as if they had never held a block, for the scheduler to add once more.

    What was about to end it, a failure or an abort, ends it. Raises what its tokenizer raises.
    """
    ends = [(s.finish_reason, s.error) for s in request.sequences if s.finish_reason in ("abort", "error")]
    request.num_unfinished = request.params.n
    for sequence in request.sequences:
        sequence.status = Status.NEW
    for sequence in request.sequences:
        _replay(sequence)
        if ends and sequence.finish_reason is None:
            sequence.finish(*ends[0])
    drawn = any(sequence.num_generated for sequence in request.sequences)
    for sequence in request.sequences:
        sequence.samples_with = (sequence,) if drawn else ()
    if not drawn:
        request.sequences[0].samples_with = request.sequences


def _replay(sequence: Sequence) -> None:
    """Everything that is derived from the tokens, once more. One without its log-probability is drawn again."""
    drawn, entries = sequence.token_ids[sequence.num_prompt_tokens :], sequence.logprobs
    del sequence.token_ids[sequence.num_prompt_tokens :]
    sequence.forget_computed()
    sequence.waits_for = sequence.keys = None
    sequence.finish_reason = sequence.stop_reason = sequence.cumulative_logprob = None
    sequence.detokenizer = sequence.request.new_text()
    sequence.logprobs = None if entries is None else []
    for token_id, entry in zip(drawn, repeat(None) if entries is None else entries, strict=False):
        sequence.append(SampledToken(token_id, entry[token_id].logprob if entry else None, entry))
    if sequence.finish_reason is not None:
        sequence.status = Status.FINISHED
