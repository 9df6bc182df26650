"""Parts behind the command: random weights without files, written checkpoints, the profiler, machine facts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from tiny_shape import TINY, TINY_SHAPE

from minipaged import LLM, SamplingParams
from minipaged.bench import machine
from minipaged.bench.limits import StepWork
from minipaged.bench.measure import Step, run_requests
from minipaged.bench.probes import Probes
from minipaged.bench.profile import ENGINE, UNSEEN, Profile, profiled
from minipaged.bench.steps import step_plan
from minipaged.bench.workloads import BenchRequest
from minipaged.bench.write_checkpoint import write_checkpoint
from minipaged.model.source import ModelSource

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
REQUESTS = [BenchRequest(list(range(3, 40)), 5), BenchRequest(list(range(50, 60)), 9)]


@pytest.fixture
def llm() -> Iterator[LLM]:
    source = ModelSource.random(TINY_SHAPE)
    with LLM(source, num_blocks=16, max_model_len=128, dtype="float32", backend="torch") as made:
        yield made


def test_a_random_shape_and_its_written_folder_are_the_same_model(tmp_path: Path, llm: LLM) -> None:
    source = ModelSource.random(TINY_SHAPE)
    write_checkpoint(source, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["model.layers.1.mlp.down_proj.weight"].shape == (64, 96)
    for name, tensor in tensors.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, source.tensors.tensor(name)), name
    again = ModelSource.from_folder(tmp_path)
    assert again.config == TINY
    with LLM(tmp_path, num_blocks=16, max_model_len=128, dtype="float32", backend="torch") as loaded:
        one = loaded.generate([[5, 6, 7]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    assert one == llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def test_transformers_reads_the_written_folder(tmp_path: Path) -> None:
    """Independent check of the file format and of config.json."""
    import tiny

    source = ModelSource.random(TINY_SHAPE)
    write_checkpoint(source, tmp_path)
    model = tiny.load_hf(tmp_path)
    assert model.config.tie_word_embeddings
    expected = source.tensors.tensor("model.layers.0.self_attn.q_proj.weight").float()
    assert torch.equal(model.model.layers[0].self_attn.q_proj.weight.detach(), expected)


def test_a_random_shape_has_no_tokenizer_and_a_name(llm: LLM) -> None:
    with pytest.raises(ValueError, match="no tokenizer"):
        llm.generate("text", GREEDY)
    assert "qwen3-tiny (random weights)" in llm.summary()
    with pytest.raises(ValueError, match=r"'qwen4' is unknown; choose one of qwen3-0\.6b"):
        ModelSource.random("qwen4")


def test_run_has_a_time_per_token_and_the_work_per_step(llm: LLM) -> None:
    run = run_requests(llm.engine, REQUESTS)
    assert [len(times) for times in run.token_times] == [5, 9]
    assert all(times == sorted(times) and times[0] > 0 for times in run.token_times)
    assert run.token_times[0][-1] <= run.seconds
    assert [step.work.tokens for step in run.steps] == [47, 2, 2, 2, 2, 1, 1, 1, 1]
    assert [step.prefill for step in run.steps] == [True] + [False] * 8
    assert run.steps[1].work.cached_tokens == 38 + 11
    assert all(step.runner_seconds <= step.seconds for step in run.steps)
    assert sum(step.seconds for step in run.steps) <= run.seconds
    assert llm.engine.stats().blocks_in_use == 0
    assert type(llm.engine.runner).__name__ == "ModelRunner"  # the recorder is gone


def test_an_aborted_run_leaves_the_engine_clean(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = llm.engine.runner
    monkeypatch.setattr(type(runner), "execute", lambda self, plan: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run_requests(llm.engine, REQUESTS)
    assert llm.engine.runner is runner
    assert not llm.engine.has_unfinished()
    assert llm.engine.stats().blocks_in_use == 0


def test_profiling_changes_no_token_and_leaves_nothing_behind(llm: LLM) -> None:
    plain = llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    model, profile = llm.loaded.model, Profile()
    backend = model.backend
    with profiled(llm.engine) as proxy:
        assert llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == plain
        proxy.take()
        run_requests(llm.engine, REQUESTS, on_step=lambda step: profile.add(step, *proxy.take()))
    assert model.backend is backend
    assert llm.engine.runner.backend is backend  # type: ignore[attr-defined]
    table = {row["op"]: row for row in profile.per_class(prefill=False)}
    assert {"attention", "linear head", "linear gate_up", "embed", ENGINE} <= set(table)
    assert len(profile.steps) == 9


def test_a_plan_made_by_hand_gives_its_blocks_back(llm: LLM) -> None:
    with step_plan(llm.engine, sequences=3, context=33, queries=2) as plan:
        assert [(row.start, row.num_tokens) for row in plan.rows] == [(31, 2)] * 3
        assert llm.engine.stats().blocks_in_use == 9
        slots = [slot for row in plan.rows for slot in row.slots]
        assert len(set(slots)) == 6
        assert len(llm.engine.runner.execute(plan).rows) == 3
    assert llm.engine.stats().blocks_in_use == 0


def test_probes_say_what_they_used() -> None:
    probes = Probes(threads=torch.get_num_threads(), buffer_bytes=1 << 22)
    assert probes.read_bandwidth() > 0
    rate, what = probes.matrix_peak(torch.float32)
    assert rate > 0
    assert what.startswith(("torch.mm of ", "native kernel ("))
    assert "4 MiB" in probes.method
    assert f"{torch.get_num_threads()} threads" in probes.method


@pytest.mark.parametrize("rates", [(3e9, 1e9), (1e9, 3e9)])
def test_the_matrix_peak_is_the_machines_and_not_that_of_one_kernel(
    rates: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    native, by_torch = rates
    probes = Probes(threads=1, buffer_bytes=1 << 20)
    monkeypatch.setattr(probes, "_native", SimpleNamespace(matrix_peak=lambda dtype: native, isa="some"))
    monkeypatch.setattr(probes, "_torch_products", lambda n, dtype: by_torch)
    best = "native kernel (some)" if native > by_torch else "torch.mm of 64 x 64"
    assert probes.matrix_peak(torch.bfloat16) == (3e9, best)


def test_a_profile_says_which_steps_it_could_not_see() -> None:
    profile = Profile()
    work = StepWork(1, 1, 1, 1)
    profile.add(Step(0.003, 0.002, work, prefill=True), {"attention": 0.001}, {"attention": 2})
    assert profile.notes() == []
    profile.add(Step(0.003, 0.002, work, prefill=False), {}, {})
    assert {row["op"]: row["ms_per_step"] for row in profile.per_class(prefill=False)} == {
        UNSEEN: pytest.approx(2.0),
        ENGINE: pytest.approx(1.0),
    }
    assert profile.notes()[0].startswith("1 of 2 profiled steps were replayed as CUDA graphs")


def test_machine_facts_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n\nprocessor\t: 1\n")
    assert machine.cpu_name(cpuinfo) == "AMD EPYC (cpu family 25, model 17)"
    for index, size in enumerate(("32K", "1024K", "32M")):
        (tmp_path / "cache" / f"index{index}").mkdir(parents=True)
        (tmp_path / "cache" / f"index{index}" / "size").write_text(size + "\n")
    monkeypatch.setattr(machine, "CACHE", tmp_path / "cache")
    assert machine.last_level_cache_bytes() == 32 << 20
    assert machine.slug({"cpu": "AMD EPYC (cpu family 25, model 17)", "cores": 2}) == "amd-epyc-2-cores"
    assert machine.versions()["torch"] == torch.__version__
