"""The whole examination: every topic in turn, and whether anything can serve."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minipaged.doctor.finding import Finding
from minipaged.doctor.installation import find_installation

ROOT = Path("/")
LOAD_SECONDS, QUICK_LOAD_SECONDS = 1.0, 0.2


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """findings in the order of the topics; backend: what `LLM()` would take, None = nothing can serve; reason: why."""

    findings: tuple[Finding, ...]
    backend: str | None
    reason: str

    @property
    def usable(self) -> bool:
        """Whether any back end can serve here."""
        return self.backend is not None

    def fact(self, name: str, key: str) -> Any:
        """One fact of the finding with that name; None if it was not found."""
        return next((finding.facts.get(key) for finding in self.findings if finding.name == name), None)

    def to_dict(self) -> dict[str, Any]:
        """For --json."""
        listed = [finding.facts for finding in self.findings if "backend" in finding.facts]
        versions = {finding.name: finding.facts["version"] for finding in self.findings if "version" in finding.facts}
        return {
            "usable": self.usable,
            "backend": self.backend,
            "backend_reason": self.reason,
            "cpu": self.fact("cpu", "name"),
            "threads": self.fact("threads", "threads"),
            "memory_limit_bytes": self.fact("memory", "limit_bytes"),
            "read_bandwidth_gb_s": self.fact("read bandwidth", "gb_s"),
            "backends": {facts["backend"]: facts["reason"] for facts in listed},
            "build_error": self.fact("back end cpu", "build_error"),
            "versions": versions,
            "findings": [
                {
                    "name": finding.name,
                    "value": finding.value,
                    "why": finding.why,
                    "state": finding.state,
                    "advice": finding.advice,
                    "facts": dict(finding.facts),
                }
                for finding in self.findings
            ],
        }


def examine(*, quick: bool = False, root: Path = ROOT, progress: Callable[[str], object] = lambda _: None) -> Diagnosis:
    """Look at everything. quick: without the bandwidth probe, which takes seconds and half a GiB."""
    from minipaged.doctor import memory, processor, software, threads

    installation = find_installation()
    findings: list[Finding] = []

    def look(name: str, topic: Callable[[], Iterable[Finding]]) -> None:
        progress(name)
        findings.extend(_guarded(name, topic))

    look("versions", lambda: software.versions(installation))
    torch_works = any(finding.name == "torch" and finding.state != "problem" for finding in findings)
    weights = _weights() if torch_works else None
    look("cpu", lambda: processor.cpu(root))
    look("threads", lambda: threads.threads(root))
    look("load by others", lambda: threads.load(root, QUICK_LOAD_SECONDS if quick else LOAD_SECONDS))
    look("memory", lambda: memory.memory(root, weights))
    look("NUMA nodes", lambda: memory.numa(root))
    look("huge pages", lambda: memory.huge_pages(root))
    if weights is None:
        return Diagnosis(tuple(findings), None, "PyTorch is missing or does not import")

    from minipaged.doctor import backends, bandwidth, gpu, hub

    look("instruction set", lambda: processor.instruction_set(root))
    look("read bandwidth", lambda: bandwidth.not_measured() if quick else bandwidth.read_bandwidth(root))
    look("GPU", lambda: gpu.gpus(root))
    device = "cuda" if any(finding.name.startswith("GPU ") for finding in findings) else "cpu"
    look("back ends", lambda: backends.backends(installation, device))
    look("OpenMP", lambda: threads.openmp(root))  # last of what loads libraries
    look("Hub cache", lambda: hub.hub(weights))
    return Diagnosis(tuple(findings), *backends.chosen_backend(device))


def _weights() -> int:
    from minipaged.doctor.bandwidth import model_bytes

    return model_bytes()


def _guarded(name: str, topic: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """A topic that fails is a finding too: the others still have to be told."""
    try:
        return list(topic())
    except Exception as error:
        return [
            Finding(
                name=name,
                value="could not be found out",
                why=f"{type(error).__name__}: {error}",
                state="warning",
                advice="please report this line; the other findings stand",
            )
        ]
