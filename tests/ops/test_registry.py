"""Choosing a back end, and one plan shared by every layer of a step."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from paged_case import assert_near, make_case

from minipaged.errors import BackendUnavailableError
from minipaged.kv.paged_cache import PagedKVCache
from minipaged.ops import AttentionBatch, available_backends, get_backend, registry


def test_every_name_is_listed_with_a_reason_or_none() -> None:
    listed = available_backends("cpu")
    assert list(listed) == ["triton", "flashinfer", "cpu", "torch", "reference"]
    assert listed["torch"] is None
    assert listed["reference"] is None
    assert all(reason is None or reason for reason in listed.values())


@pytest.mark.parametrize("name", ["torch", "reference"])
def test_a_name_gives_that_back_end(name: str) -> None:
    first, second = get_backend(name), get_backend(name)
    assert first.name == name
    assert first is not second
    assert not first.batch_invariant


def test_none_takes_the_best_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    only_torch = {"cpu": ("minipaged.ops.no_such_module", "Nothing"), "torch": registry._BACKENDS["torch"]}
    monkeypatch.setattr(registry, "_BACKENDS", only_torch)
    assert get_backend(None).name == "torch"


def test_unknown_and_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ValueError, match="backend='cudnn' is unknown; choose one of 'triton', 'flashinfer', 'cpu', 'torch'"
    ):
        get_backend("cudnn")
    monkeypatch.setitem(registry._BACKENDS, "cpu", ("minipaged.ops.no_such_module", "Nothing"))
    with pytest.raises(BackendUnavailableError, match="'cpu' cannot run on cpu: this installation does not contain it"):
        get_backend("cpu")
    assert get_backend("torch").name == "torch"


@pytest.mark.parametrize("name", ["torch", "reference"])
def test_one_plan_serves_all_layers(name: str) -> None:
    """Caches of the same geometry and of different ones; the plan holds nothing of a layer's content."""
    case = make_case([9, 30, 200], [1, 30, 7])
    batch = AttentionBatch(
        positions=torch.empty(0, dtype=torch.int64),
        slot_mapping=torch.empty(0, dtype=torch.int64),
        block_tables=case.block_tables,
        seq_lens=case.seq_lens,
        query_start_loc=case.query_start_loc,
        max_query_len=30,
        max_seq_len=200,
    )
    backend = get_backend(name)
    plan = backend.plan(batch)
    first = PagedKVCache.from_tensors(case.key_cache, case.value_cache)
    expected = case.expected()
    assert_near(backend.attention(case.query, first, plan), expected, 1e-5)
    doubled = PagedKVCache.from_tensors(case.key_cache, case.value_cache * 2)
    assert_near(backend.attention(case.query, doubled, plan), 2 * expected, 1e-5)
    both = torch.stack([case.key_cache, case.value_cache], dim=1)
    interleaved = PagedKVCache.from_tensors(both[:, 0], both[:, 1])
    assert_near(backend.attention(case.query, interleaved, plan), expected, 1e-5)
    backend.copy_blocks([first, doubled], [(0, 1)])
    for cache in (first, doubled):
        for tensor in (cache.key_cache, cache.value_cache):
            assert torch.equal(tensor[0].nan_to_num(99), tensor[1].nan_to_num(99))


def test_importing_ops_does_not_import_torch() -> None:
    """Nothing heavy until a name is used (`import minipaged` works without torch)."""
    code = "import sys, minipaged.ops; assert 'torch' not in sys.modules; minipaged.ops.get_backend; print('ok')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "ok\n", done.stderr
