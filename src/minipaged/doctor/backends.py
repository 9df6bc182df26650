"""Each back end: whether it can serve, or what keeps it from doing so."""

from __future__ import annotations

from dataclasses import replace

from minipaged.doctor.finding import NOTHING, Finding, State
from minipaged.doctor.installation import Installation
from minipaged.doctor.native_build import BuildTrouble, explain_missing_library, first_error
from minipaged.errors import BackendUnavailableError


def chosen_backend(device: str) -> tuple[str | None, str]:
    """(name, why) of what `LLM()` would take on `device`; (None, the error) if nothing can serve."""
    from minipaged.ops.registry import backend_note, best_backend

    name = best_backend(device)
    error = _start_error(name, device)
    return (name, backend_note(name, device)) if error is None else (None, error)


def backends(installation: Installation, device: str) -> list[Finding]:
    """One finding per back end, best first. device: "cuda" if there is a GPU, else "cpu"."""
    from minipaged.ops.registry import GPU_BACKENDS, available_backends

    on_gpu, on_cpu = available_backends("cuda"), available_backends("cpu")
    found = []
    for name in on_cpu:
        where = "cuda" if name in GPU_BACKENDS else "cpu"
        reason = (on_gpu if where == "cuda" else on_cpu)[name] or _start_error(name, where)
        if reason is None:
            found.append(_available(name, where) if name != "cpu" else _native_available(installation))
        elif name == "cpu":
            found.append(_native_unavailable(reason, installation))
        elif name in GPU_BACKENDS:
            found.append(_gpu_unavailable(name, reason, device))
        else:
            found.append(_finding(name, reason, "problem", f"reinstall minipaged: {installation.rebuild_command}"))
    return found


def _available(name: str, where: str) -> Finding:
    uses = {
        "triton": ("GPU kernels", "`minipaged tune` measures their tiles once"),
        "flashinfer": ("FlashInfer's attention, the rest as triton", "--backend flashinfer asks for it"),
        "cpu": ("C++ kernels; the same bits in any batch", NOTHING),
        "torch": ("PyTorch's kernels, on CPU and GPU", "--backend torch asks for it"),
        "reference": ("loops in float64, to be read", "--backend reference asks for it; it is slow"),
    }
    why, advice = uses.get(name, ("", f"--backend {name} asks for it"))
    return Finding(
        name=f"back end {name}",
        value=f"available on {where}",
        why=why,
        advice=advice,
        facts={"backend": name, "reason": None},
    )


def _native_available(installation: Installation) -> Finding:
    from minipaged.ops.cpu.library import BUILD_LOG

    finding = _available("cpu", "cpu")
    if not BUILD_LOG.is_file():
        return finding
    excerpt = first_error(BUILD_LOG.read_text(encoding="utf-8", errors="replace"))
    return replace(
        finding,
        why="an older library serves: the last build failed",
        state="warning",
        advice=f"its kernels may not be those of the source: {installation.rebuild_command}",
        facts={**finding.facts, "build_error": excerpt, "build_log": str(BUILD_LOG)},
    )


def _native_unavailable(reason: str, installation: Installation) -> Finding:
    from minipaged.ops.cpu.library import BUILD_LOG, LIBRARY

    if LIBRARY.exists():
        if "MINIPAGED_CPU_ISA" in reason:
            return _finding("cpu", reason, "problem", "unset MINIPAGED_CPU_ISA: nothing serves by itself until then")
        return _finding("cpu", reason, "warning", f"build it on this machine: {installation.rebuild_command}")
    trouble = explain_missing_library(BUILD_LOG)
    return native_missing(trouble, installation)


def native_missing(trouble: BuildTrouble, installation: Installation) -> Finding:
    """The native library was not built: what the build said and how to repeat it."""
    again = installation.rebuild_command
    advice = again if trouble.works_now else f"install a C++ compiler with OpenMP (g++), then: {again}"
    finding = _finding("cpu", f"the native kernels are not there: {trouble.summary}", "warning", advice)
    facts = {"build_error": trouble.excerpt or None, "build_log": trouble.log and str(trouble.log)}
    value = "not available: back end torch serves, more slowly"
    return replace(finding, value=value, facts={**finding.facts, **facts})


def _gpu_unavailable(name: str, reason: str, device: str) -> Finding:
    from minipaged.ops.registry import chosen_by_itself

    if device == "cpu":
        return _finding(name, reason, "note", "nothing to do without a GPU: it computes on GPUs only")
    if not chosen_by_itself(name, device):
        return _finding(name, reason, "note", f"nothing to do, unless you want --backend {name}: others serve the GPU")
    return _finding(name, reason, "warning", "pip install '.[gpu]'; torch serves on the GPU meanwhile")


def _start_error(name: str, device: str) -> str | None:
    """Why an available back end does not start all the same (an instruction set that is not here, say)."""
    from minipaged.ops.registry import get_backend

    try:
        get_backend(name, device)
    except BackendUnavailableError as error:
        return str(error)
    return None


def _finding(name: str, reason: str, state: State, advice: str) -> Finding:
    return Finding(
        name=f"back end {name}",
        value="not available",
        why=reason,
        state=state,
        advice=advice,
        facts={"backend": name, "reason": reason},
    )
