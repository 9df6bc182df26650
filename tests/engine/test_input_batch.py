"""What a step's arrays say about the tokens of a plan."""

from __future__ import annotations

from minipaged.engine.plan import ScheduledSequence, StepPlan
from minipaged.engine.request import Sequence
from minipaged.kv import BlockEvent
from minipaged.runner.input_batch import InputBatch
from minipaged.sampling_params import SamplingParams


def test_a_plan_lists_whose_logits_are_wanted() -> None:
    """Of any number of tokens per sequence: R rows of logits, in the order of the tokens of the batch."""
    params = SamplingParams(temperature=0.0, max_tokens=4).resolve(None, 10)
    sequences = [Sequence(i, 0, list(range(100 * i, 100 * i + 12)), 12, params, 0) for i in range(5)]
    batch = InputBatch(max_tokens=32, max_seqs=5, max_blocks=3, block_size=4, num_slots=60)
    for sequence in sequences:
        for index in range(3):
            batch.tables.on_event(BlockEvent("allocate", 3 * sequence.sequence_id + index, sequence.sequence_id, index))

    def row(i: int, start: int, count: int, num_logits: int) -> ScheduledSequence:
        slots = [12 * i + at for at in range(start, start + count)]
        return ScheduledSequence(sequences[i], start, count, slots, num_logits=num_logits)

    # A decode, a chunk with three tokens to verify, a chunk of a prompt that goes on, a scored prompt, a prompt's end.
    rows = [row(0, 11, 1, 1), row(1, 7, 5, 3), row(2, 0, 6, 0), row(3, 0, 4, 4), row(4, 8, 4, 1)]
    filled = batch.fill(StepPlan(rows, [], 20))
    assert filled.logits_rows.tolist() == [0, 3, 4, 5, 12, 13, 14, 15, 19]
    assert filled.token_ids[filled.logits_rows].tolist() == [11, 109, 110, 111, 300, 301, 302, 303, 411]
    assert filled.attention.query_start_loc.tolist() == [0, 1, 6, 12, 16, 20]
    assert filled.attention.positions.tolist() == [11, *range(7, 12), *range(6), *range(4), *range(8, 12)]
    assert filled.attention.seq_lens.tolist() == [12, 12, 6, 4, 12]
    assert filled.attention.num_decode_rows == 1
