"""What callers can be told: each message says what was wrong, the numbers, and which option to change."""

from __future__ import annotations


class OutOfBlocksError(RuntimeError):
    """The block pool cannot serve an allocation; nothing was changed."""


class UnknownSequenceError(KeyError):
    """No live sequence has this id, which is `args[0]`."""

    def __str__(self) -> str:
        return f"sequence {self.args[0]!r} is not live: it was never created, or has been released"


class InvariantError(RuntimeError):
    """The block manager's bookkeeping contradicts itself; the message names the block and the broken rule."""


class RequestTooLargeError(ValueError):
    """A request that can never fit: longer than `max_model_len`, or more blocks than the pool has."""


class PoolSizeWarning(UserWarning):
    """The KV pool holds less than the longest request that the model allows; `LLM.summary` says so too."""


class UnsupportedModelError(ValueError):
    """The checkpoint describes a model that this engine does not implement."""


class CheckpointError(ValueError):
    """The checkpoint is incomplete or inconsistent: missing, unexpected or wrongly shaped tensors, a missing shard."""


class BackendUnavailableError(RuntimeError):
    """The requested back end cannot run here; the message says why and what would serve instead."""
