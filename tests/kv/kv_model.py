"""A harness that drives the block manager and a naive model of it, and compares everything after every operation.

The model is slow and plain, see `kv_mirror`. Reading a sequence back through its table must give its own history at
every position.
"""

from __future__ import annotations

import random

import pytest
from kv_mirror import CachedBlock, Mirror, ModelSequence

from minipaged.kv import OutOfBlocksError


class Harness(Mirror):
    # --- operations ---

    def create(self, salt: str | None = None) -> int:
        seq_id, self.next_id = self.next_id, self.next_id + 1
        self.seqs[seq_id] = ModelSequence(salt)
        self.manager.create_sequence(seq_id, salt=salt)
        return seq_id

    def append(self, seq_id: int, tokens: list[int], how: str = "tokens") -> bool:
        seq = self.seqs[seq_id]
        before = self.snapshot()
        needed = self.manager.blocks_needed(seq_id, len(tokens))
        available = self.manager.num_available_blocks
        try:
            if how == "token" and len(tokens) == 1:
                slots = [self.manager.append_token(seq_id)]
            elif how == "tensor" and len(tokens) == 1:
                slots = self.manager.slot_mapping_for_append([seq_id]).tolist()
            else:
                slots = self.manager.append_tokens(seq_id, len(tokens))
        except OutOfBlocksError:
            assert needed > available, f"refused, though {needed} blocks of {available} were needed"
            assert self.snapshot() == before, "a refused append changed something"
            return False
        assert needed <= available
        assert available - self.manager.num_available_blocks == needed, "blocks_needed is what was taken"
        self.after_append(seq_id, tokens, slots)
        assert seq.table == self.manager.sequences[seq_id].block_table
        return True

    def append_batch(self, seq_ids: list[int], token: int) -> bool:
        before = self.snapshot()
        available = self.manager.num_available_blocks
        try:
            slots = self.manager.slot_mapping_for_append(seq_ids).tolist()
        except OutOfBlocksError:
            assert self.snapshot() == before, "a refused batch changed something"
            if not self.pairs:  # pending copies may make it a little too careful, see has_destinations
                assert self.batch_need(seq_ids) > available
            return False
        for seq_id, slot in zip(seq_ids, slots, strict=True):
            self.after_append(seq_id, [token], [slot])
        return True

    def batch_need(self, seq_ids: list[int]) -> int:
        need, owners = 0, {}
        for seq in (self.seqs[s] for s in seq_ids):
            if len(seq.tokens) % self.bs == 0:
                need += 1
                continue
            block = seq.table[-1]
            owners.setdefault(block, self.owners(block))
            if owners[block] > 1:
                need += 1
                owners[block] -= 1
        return need

    def after_append(self, seq_id: int, tokens: list[int], slots: list[int]) -> None:
        seq = self.seqs[seq_id]
        assert len(slots) == len(tokens)
        for token, slot in zip(tokens, slots, strict=True):
            pos = len(seq.tokens)
            seq.tokens.append(token)
            block = slot // self.bs
            assert slot == seq.table[pos // self.bs] * self.bs + pos % self.bs
            assert self.owners(block) == 1, "a slot to write in a block that others read"
            assert block not in self.cached, "a slot to write in a cached block"
            assert slot not in self.unwritten, "two tokens were given the same slot"
            self.unwritten[slot] = tuple(seq.tokens)

    def fork(self, parent_id: int) -> int:
        child_id, self.next_id = self.next_id, self.next_id + 1
        parent = self.seqs[parent_id]
        self.seqs[child_id] = ModelSequence(
            parent.salt,
            list(parent.tokens),
            [],
            parent.written,
            parent.committed,
            parent.parent_generation,
            parent.attached,
            set(parent.lost),
        )
        self.manager.fork_sequence(parent_id, child_id)
        assert self.seqs[child_id].table == parent.table
        return child_id

    def flush(self) -> None:
        """One step's memory work: all copies, then all writes."""
        pairs = self.manager.take_block_copies()
        assert pairs == [(source, destination) for destination, source in self.pairs.items()]
        sources, destinations = [s for s, _ in pairs], [d for _, d in pairs]
        assert len(set(destinations)) == len(destinations)
        assert not set(sources) & set(destinations)
        for source, destination in pairs:
            for offset in range(self.bs):
                self.memory[destination * self.bs + offset] = self.memory[source * self.bs + offset]
        self.pairs.clear()
        for slot, content in self.unwritten.items():
            self.memory[slot] = content
        self.unwritten.clear()
        for seq in self.seqs.values():
            seq.written = len(seq.tokens)
        self.read_back()

    def read_back(self) -> None:
        for seq_id, seq in self.seqs.items():
            for pos in range(seq.written):
                if pos not in seq.lost:
                    found = self.memory[self.manager.slot_of(seq_id, pos)]
                    assert found == tuple(seq.tokens[: pos + 1]), f"sequence {seq_id}, position {pos}"

    def commit(self, seq_id: int, count: int) -> None:
        seq = self.seqs[seq_id]
        end = min(seq.committed + count, seq.written, *seq.lost)
        end = max(end, seq.committed)
        new = seq.tokens[seq.committed : end]
        by_history = {(c.salt, c.history): c for c in self.cached.values()}
        alive = {c.generation for c in self.cached.values()}
        if self.caching:
            if seq.parent_generation is not None and seq.parent_generation not in alive:
                seq.attached = False
            for logical in range(seq.committed // self.bs, end // self.bs if seq.attached else 0):
                history = tuple(seq.tokens[: (logical + 1) * self.bs])
                entry = by_history.get((seq.salt, history))
                if entry is None:
                    entry = CachedBlock(seq.salt, history, self.generations)
                    self.generations += 1
                    assert seq.table[logical] not in self.cached
                    self.cached[seq.table[logical]] = entry
                    by_history[seq.salt, history] = entry
                seq.parent_generation = entry.generation
        self.manager.commit_tokens(seq_id, new)
        seq.committed = end

    def create_from_prefix(self, prompt: list[int], salt: str | None = None) -> int:
        seq_id, self.next_id = self.next_id, self.next_id + 1
        by_history = {(c.salt, c.history): b for b, c in self.cached.items()}
        blocks: list[int] = []
        while (len(blocks) + 1) * self.bs < len(prompt):
            block = by_history.get((salt, tuple(prompt[: (len(blocks) + 1) * self.bs])))
            if block is None:
                break
            blocks.append(block)
        matched = len(blocks) * self.bs
        assert self.manager.match_prefix(prompt, salt=salt) == matched
        keys = self.waiting.setdefault((tuple(prompt), salt), self.manager.prefix_keys(prompt, salt=salt))
        assert self.manager.match_prefix(keys) == matched, (
            "keys that were matched before, at another state of the cache"
        )
        for pos in range(matched):
            content = self.memory[blocks[pos // self.bs] * self.bs + pos % self.bs]
            assert content == tuple(prompt[: pos + 1]), "a false prefix hit"
        for block in blocks:
            self.cached[block].hits += 1
        seq = ModelSequence(salt, prompt[:matched], [], matched, matched)
        if blocks:
            seq.parent_generation = self.cached[blocks[-1]].generation
        self.seqs[seq_id] = seq
        state = self.manager.create_sequence_from_prefix(seq_id, prompt, salt=salt)
        assert state.block_table == blocks == seq.table
        assert state.sequence_length == matched
        self.hits += bool(matched)
        return seq_id

    def release(self, seq_id: int) -> None:
        seq = self.seqs.pop(seq_id)
        for block in reversed(seq.table):
            if self.owners(block):
                continue
            self.pairs.pop(block, None)
            for slot in range(block * self.bs, (block + 1) * self.bs):
                self.unwritten.pop(slot, None)
            if block in self.cached:
                self.clock += 1
                self.cached[block].released = self.clock
            else:
                self.free.insert(0, block)
        self.manager.release_sequence(seq_id)

    def allocate_block(self) -> bool:
        if not self.manager.num_available_blocks:
            with pytest.raises(OutOfBlocksError):
                self.manager.allocate_block()
            return False
        self.held.append(self.manager.allocate_block())
        return True

    def free_block(self, place: int) -> None:
        block = self.held.pop(place)
        self.free.insert(0, block)
        self.manager.free_block(block)

    def reset_cache(self) -> None:
        for block in sorted((b for b in self.cached if not self.owners(b)), key=lambda b: self.cached[b].released):
            self.free.insert(0, block)
        # events of the reset follow the release order, not the policy, so they are not compared with it
        listener, self.manager._pool.listener = self.manager._pool.listener, None
        poisoned = [b for b in self.cached if not self.owners(b)]
        self.manager.reset_prefix_cache()
        self.manager._pool.listener = listener
        for block in poisoned:
            if block not in self.pairs.values():
                self.poison(block)
        self.cached.clear()
        for seq in self.seqs.values():
            if seq.committed:
                seq.attached, seq.parent_generation = False, None

    # --- comparison ---

    def snapshot(self) -> object:
        m = self.manager
        return (
            {s: (state.sequence_length, tuple(state.block_table)) for s, state in m.sequences.items()},
            m.free_blocks,
            tuple(m._pool.idle),
            tuple(m.ref_count(b) for b in range(m.num_physical_blocks)),
            dict(m._pool.copies.source_of),
            m.internal_fragmentation_tokens(),
        )

    def check(self) -> None:
        m = self.manager
        m.check_invariants()
        assert m.sequences.keys() == self.seqs.keys()
        in_use: dict[int, int] = {}  # block -> tokens in it
        for seq_id, seq in self.seqs.items():
            state = m.sequences[seq_id]
            assert state.sequence_id == seq_id
            assert state.sequence_length == len(seq.tokens)
            assert state.block_table == seq.table
            for logical, block in enumerate(seq.table):
                in_use[block] = min(len(seq.tokens) - logical * self.bs, self.bs)
        in_use.update(dict.fromkeys(self.held, 0))
        counts = [self.owners(b) for b in range(m.num_physical_blocks)]
        assert [m.ref_count(b) for b in range(m.num_physical_blocks)] == counts
        assert list(m.free_blocks) == self.free
        assert m.num_free_blocks == len(self.free)
        assert m.num_idle_blocks == sum(not self.owners(b) for b in self.cached)
        assert m.num_available_blocks == m.num_free_blocks + m.num_idle_blocks
        assert m.num_available_blocks + len(in_use) == m.num_physical_blocks
        assert m.num_blocks_in_use == len(in_use)
        assert m.num_shared_blocks == sum(count > 1 for count in counts)
        assert m.num_saved_blocks == sum(counts) - len(in_use)
        assert m.internal_fragmentation_tokens() == sum(self.bs - tokens for tokens in in_use.values())


def random_operation(h: Harness, rng: random.Random, max_sequences: int = 8) -> str:
    """One random operation on the harness; its name."""
    live = list(h.seqs)
    name = rng.choices(
        ["create", "prefix", "append", "batch", "fork", "flush", "commit", "release", "hold", "unhold", "reset"],
        [2, 5, 12, 3, 4, 8, 8, 6, 1, 1, 0.15],
    )[0]
    if not live and name in ("append", "batch", "fork", "commit", "release"):
        name = "prefix"
    if len(live) >= max_sequences and name in ("create", "prefix", "fork"):
        name = "release"
    salt = rng.choice([None, None, None, "tenant"])
    if name == "create":
        h.create(salt)
    elif name == "prefix":
        prompt = [rng.choice([1, 1, 1, 2]) for _ in range(rng.randrange(1, 5 * h.bs))]
        seq_id = h.create_from_prefix(prompt, salt)
        rest = prompt[len(h.seqs[seq_id].tokens) :]
        h.append(seq_id, rest[: rng.randrange(len(rest) + 1)])
    elif name == "append":
        count = rng.choice([1, 1, 1, h.bs, rng.randrange(0, 3 * h.bs)])
        tokens = [rng.choice([1, 1, 1, 2]) for _ in range(count)]
        h.append(rng.choice(live), tokens, rng.choice(["token", "tokens"]))
    elif name == "batch":
        h.append_batch(rng.sample(live, rng.randrange(1, len(live) + 1)), rng.choice([1, 2]))
    elif name == "fork":
        h.fork(rng.choice(live))
    elif name == "flush":
        h.flush()
    elif name == "commit":
        h.commit(rng.choice(live), rng.randrange(0, 4 * h.bs))
    elif name == "release":
        h.release(rng.choice(live))
    elif name == "hold":
        h.allocate_block()
    elif name == "unhold" and h.held:
        h.free_block(rng.randrange(len(h.held)))
    elif name == "reset":
        h.reset_cache()
    return name
