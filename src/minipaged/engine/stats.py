"""Numbers about an engine at one moment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineStats:
    """running, waiting: sequences now (a waiting request counts once, whatever its n). preemptions, recomputed_tokens:
    since the start.

    Blocks now: free + idle + in_use = total; shared is the part of in_use that more than one sequence holds, saved is
    how many blocks more there would have to be without sharing. prefix_query_tokens, prefix_hit_tokens: prompt tokens
    looked up and found, since the start. internal_fragmentation_tokens: slots of blocks in use that hold no token, now.
    eviction_policy: the name of the one that serves; "lru (NAME failed: ...)" once one of the caller's own has failed.
    """

    running: int
    waiting: int
    preemptions: int
    recomputed_tokens: int
    blocks_total: int
    blocks_free: int
    blocks_idle: int
    blocks_in_use: int
    blocks_shared: int
    blocks_saved: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    internal_fragmentation_tokens: int
    eviction_policy: str
