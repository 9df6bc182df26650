"""Threads and memory: what a container allows is what counts, read from files that the tests write."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from minipaged import LLM, cgroup
from minipaged.llm.memory import check_cpu_memory, size_pool
from minipaged.model import weights
from minipaged.model.random_weights import QWEN3_SHAPES
from minipaged.threads import default_threads
from tiny import make_tiny_folder

GIB = 2**30


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def roots(tmp_path: Path) -> tuple[Path, Path]:
    write(tmp_path / "proc/meminfo", f"MemTotal: {64 * 2**20} kB\nMemAvailable:   {40 * 2**20} kB\n")
    write(tmp_path / "proc/self/cgroup", "0::/app/job\n")
    (tmp_path / "cgroup").mkdir()
    return tmp_path / "proc", tmp_path / "cgroup"


def test_no_limit_anywhere(roots: tuple[Path, Path]) -> None:
    assert cgroup.cpu_quota(*roots) is None
    assert cgroup.memory_limit(*roots) is None
    assert cgroup.available_memory(*roots) == 40 * GIB
    assert default_threads(*roots) == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(("quota", "cpus"), [("165000", 1.65), ("50000", 0.5), ("max", None), ("400000", 4.0)])
def test_threads_are_the_whole_processors_of_the_quota(
    roots: tuple[Path, Path], quota: str, cpus: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C50: min(affinity, floor(quota)), at least 1."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(3)), raising=False)
    write(roots[1] / "app/job/cpu.max", f"{quota} 100000\n")
    assert cgroup.cpu_quota(*roots) == cpus
    assert default_threads(*roots) == (3 if cpus is None else max(1, min(3, int(cpus))))


def test_a_limit_of_a_group_above_holds_too(roots: tuple[Path, Path]) -> None:
    write(roots[1] / "app/cpu.max", "100000 100000")
    write(roots[1] / "app/job/cpu.max", "800000 100000")
    write(roots[1] / "other/cpu.max", "10000 100000")
    assert cgroup.cpu_quota(*roots) == 1.0


def test_memory_of_version_2(roots: tuple[Path, Path]) -> None:
    write(roots[1] / "app/job/memory.max", str(8 * GIB))
    write(roots[1] / "app/job/memory.current", str(5 * GIB))
    write(roots[1] / "app/job/memory.stat", f"anon 1\ninactive_file {2 * GIB}\n")
    assert cgroup.memory_limit(*roots) == 8 * GIB
    assert cgroup.available_memory(*roots) == 5 * GIB  # 8 - (5 - 2): the kernel drops file pages when it has to


@pytest.mark.parametrize(
    ("stat", "available"),
    [
        ({"active_file": 2, "inactive_file": 0}, 3),
        ({"active_file": 1, "inactive_file": 1}, 3),
        ({"active_file": 2, "file_dirty": 1}, 2),
        ({"active_file": 2, "file_mapped": 1, "file_writeback": 1}, 1),
        ({"active_file": 1, "file_mapped": 2}, 1),
        ({"anon": 3}, 1),
    ],
)
@pytest.mark.parametrize("version", [1, 2])
def test_pages_of_files_that_can_be_dropped_are_available(
    roots: tuple[Path, Path], stat: dict[str, int], available: int, version: int
) -> None:
    if version == 1:
        write(roots[0] / "self/cgroup", "4:memory:/app/job\n")
        names = {"file_dirty": "dirty", "file_writeback": "writeback", "file_mapped": "mapped_file"}
        stat = {f"total_{names.get(name, name)}": value for name, value in stat.items()}
        group, limit, usage = roots[1] / "memory/app/job", "memory.limit_in_bytes", "memory.usage_in_bytes"
    else:
        group, limit, usage = roots[1] / "app/job", "memory.max", "memory.current"
    write(group / limit, str(4 * GIB))
    write(group / usage, str(3 * GIB))
    write(group / "memory.stat", "".join(f"{name} {value * GIB}\n" for name, value in stat.items()))
    assert cgroup.available_memory(*roots) == available * GIB


def test_version_1(roots: tuple[Path, Path]) -> None:
    write(roots[0] / "self/cgroup", "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n1:name=systemd:/\n")
    write(roots[1] / "cpu/docker/abc/cpu.cfs_quota_us", "250000")
    write(roots[1] / "cpu/docker/abc/cpu.cfs_period_us", "100000")
    write(roots[1] / "cpu/cpu.cfs_quota_us", "-1")
    write(roots[1] / "cpu/cpu.cfs_period_us", "100000")
    write(roots[1] / "memory/memory.limit_in_bytes", str(9223372036854771712))
    write(roots[1] / "memory/docker/abc/memory.limit_in_bytes", str(6 * GIB))
    write(roots[1] / "memory/docker/abc/memory.usage_in_bytes", str(1 * GIB))
    assert cgroup.cpu_quota(*roots) == 2.5
    assert cgroup.memory_limit(*roots) == 6 * GIB
    assert cgroup.available_memory(*roots) == 5 * GIB


def test_inside_a_container_the_group_is_the_root(roots: tuple[Path, Path]) -> None:
    write(roots[0] / "self/cgroup", "0::/../../seen/from/outside\n")
    write(roots[1] / "memory.max", str(3 * GIB))
    write(roots[1] / "cpu.max", "200000 100000")
    assert cgroup.memory_limit(*roots) == 3 * GIB
    assert cgroup.cpu_quota(*roots) == 2.0


def run_python(code: str, *prefix: str) -> str:
    result = subprocess.run([*prefix, sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_the_first_thread_count_holds_and_a_second_one_warns() -> None:
    """C50, in processes of their own because the count is the process's."""
    code = """
import warnings, torch
from minipaged.threads import set_threads
print(set_threads(1), torch.get_num_threads())
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    print(set_threads(), set_threads(1), len(caught))
    print(set_threads(7), len(caught), caught[0].message)
"""
    lines = run_python(code).splitlines()
    assert lines[:2] == ["1 1", "1 1 0"]
    assert lines[2] == "1 1 threads = 7 has no effect: this process already computes with 1"


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinity mask on this system")
def test_affinity_counts() -> None:
    cpu = min(os.sched_getaffinity(0))
    code = f"""
import os
os.sched_setaffinity(0, [{cpu}])
from minipaged.threads import set_threads
print(set_threads())
"""
    assert run_python(code) == "1"


@pytest.mark.parametrize(
    ("wish", "count"), [("1", 1), (" 1 ,4", 1), ("5", 2), ("0", 2), ("-1", 2), ("many", 2), ("", 2)]
)
def test_the_users_environment_may_ask_for_fewer(wish: str, count: int) -> None:
    """C50: the user's value wins, also where it comes as OMP_NUM_THREADS; never more than the container's processors,
    and the keyword wins over both.
    """
    code = f"""
import os
os.environ["OMP_NUM_THREADS"] = {wish!r}
from minipaged import threads
threads.default_threads = lambda: 2
print(threads.set_threads())
"""
    assert run_python(code) == str(count)
    keyword = code.replace("set_threads()", "set_threads(3)")
    assert run_python(keyword) == "3"


def sized(**options: object):
    return size_pool(
        **{
            "block_bytes": 100,
            "block_size": 16,
            "available_bytes": 1000,
            "model_max_len": 81,
            "max_num_seqs": 64,
            **options,
        }
    )


def test_the_pool_is_what_was_asked_for_first() -> None:
    assert sized().num_blocks == 10
    assert sized(kv_cache_memory=700).num_blocks == 7
    assert sized(kv_cache_memory=700, num_blocks=6).num_blocks == 6
    assert sized(available_bytes=500).max_model_len == 81  # 5 blocks hold 80 tokens, and the last one is never written
    with pytest.warns(UserWarning, match="lowered from 81 to 65"):
        assert sized(available_bytes=499).max_model_len == 65
    with pytest.warns(UserWarning, match="num_blocks = 4 holds requests of 65 tokens"):
        assert sized(num_blocks=4).max_model_len == 81
    with pytest.raises(ValueError, match="kv_cache_memory"):
        sized(available_bytes=499, max_model_len=81)


def test_an_automatic_pool_is_no_larger_than_what_can_be_filled() -> None:
    """A tiny model on a large machine: 3 requests of 81 tokens (80 are written) fill 15 blocks of 16."""
    assert sized(available_bytes=10**9, max_num_seqs=3).num_blocks == 15
    assert sized(kv_cache_memory=10**5, max_num_seqs=3).num_blocks == 1000, "what is asked for is taken"


def test_what_a_model_needs_whatever_the_pool() -> None:
    """Of 0.6B in bfloat16: 596,049,920 weights; rows of 1024 + 4096 + 2048 + 2048 + 3072; 512 bytes per position."""
    config = QWEN3_SHAPES["qwen3-0.6b"]
    need = 2 * 596_049_920 + 513 * 2 * 12_288 + 40_960 * 512
    ask = {"tokens": 513, "positions": 40_960}
    check_cpu_memory(config, 2, **ask, available=need)
    check_cpu_memory(config, 2, **ask, available=None)
    with pytest.raises(MemoryError, match=r"weights \(1\.11 GiB\), 513 tokens .* lower max_num_batched_tokens"):
        check_cpu_memory(config, 2, **ask, available=need - 1)


def test_a_model_that_memory_cannot_hold_is_refused_before_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny_folder(tmp_path, edit_config={"max_position_embeddings": 10**12})
    monkeypatch.setattr(weights, "load_model", None)
    with pytest.raises(MemoryError, match=r"1000000000000 positions .* lower .* max_model_len"):
        LLM(folder)


@pytest.mark.parametrize("option", ["num_blocks", "kv_cache_memory"])
def test_a_pool_larger_than_the_memory_is_an_error_at_start(
    tiny_folder: Path, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The boundary is exact: what fits to the byte starts."""
    from minipaged import LLM

    block = 2 * 2 * 2 * 32 * 4 * 4  # K and V, layers, heads, head_dim, float32, tokens
    room = 1000 * block
    monkeypatch.setattr(cgroup, "available_memory", lambda: room)
    sizes = {"num_blocks": (1000, 1001), "kv_cache_memory": (1000 * block, 1001 * block)}[option]
    LLM(tiny_folder, block_size=4, dtype="float32", max_model_len=64, **{option: sizes[0]}).close()
    with pytest.raises(MemoryError, match=rf"pool of {1001 * block} bytes .* does not fit: {room} .*lower num"):
        LLM(tiny_folder, block_size=4, dtype="float32", max_model_len=64, **{option: sizes[1]})
    monkeypatch.setattr(cgroup, "available_memory", lambda: None)
    LLM(tiny_folder, block_size=4, dtype="float32", max_model_len=64, **{option: sizes[1]}).close()


def test_a_fork_of_a_process_that_computed_with_several_threads_is_told_so() -> None:
    code = """
import os
from minipaged.threads import set_threads
set_threads(2)
pid = os.fork()
if pid == 0:
    try:
        set_threads(2)
    except RuntimeError as error:
        os._exit(0 if "spawn" in str(error) else 1)
    os._exit(2)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    assert run_python(code) == "0"


def test_more_threads_than_any_machine_has_are_refused() -> None:
    code = """
from minipaged.threads import set_threads
try:
    set_threads(32768)
except ValueError as error:
    print(error)
"""
    assert "threads must be at most 1024, got 32768" in run_python(code)
