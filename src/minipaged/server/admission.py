"""How many sequences may wait, and what a refused client is told."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from minipaged.server.errors import ApiError, refused

if TYPE_CHECKING:
    from minipaged.engine import Request


class Admission:
    """The live requests of this server. A request waits until its first token is scheduled; one with n = 3 counts 3.

    Used on the event loop only.
    """

    def __init__(self, limit: int, max_num_seqs: int) -> None:
        self.limit = limit
        self.max_num_seqs = max_num_seqs
        self.draining = False
        self.live: dict[str, Request] = {}
        self._mean_seconds = 1.0  # of a request, exponentially forgetting

    @property
    def queued(self) -> int:
        """Sequences that have not been scheduled yet."""
        return sum(r.params.n for r in self.live.values() if r.metrics.first_scheduled_time is None)

    @property
    def full(self) -> bool:
        """Whether not even one more may wait."""
        return self.queued >= self.limit

    def check_size(self, prompts: int, n: int) -> None:
        """ApiError 400 if so many prompts with so many children each, of one call, can never wait together."""
        sequences = prompts * n
        if sequences > self.limit:
            raise refused(
                f"{sequences} sequences (prompts times n) can never wait in a queue of {self.limit}: "
                "max_queued_requests",
                "n" if n > self.limit else "prompt",
            )

    def check(self, requests: Sequence[Request]) -> None:
        """ApiError 429 with Retry-After if there is no room for them now."""
        wanted = sum(request.params.n for request in requests)
        queued = self.queued
        if queued + wanted > self.limit:
            raise ApiError(
                429,
                f"the queue is full: {queued} sequences wait, {wanted} more were asked for, "
                f"max_queued_requests = {self.limit}",
                code="queue_full",
                headers={"Retry-After": str(self.retry_after())},
            )

    def retry_after(self) -> int:
        """Seconds after which half of the queue should be through, from 1 to 60."""
        return min(60, max(1, math.ceil(self.queued * self._mean_seconds / self.max_num_seqs / 2)))

    def enter(self, request: Request) -> None:
        """A request has been submitted."""
        self.live[request.request_id] = request

    def leave(self, request: Request) -> None:
        """It has ended, or been given up."""
        self.live.pop(request.request_id, None)
        metrics = request.metrics
        if metrics.finished_time is not None:
            self._mean_seconds += 0.1 * (metrics.finished_time - metrics.arrival_time - self._mean_seconds)
