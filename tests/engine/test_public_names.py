"""What `minipaged.engine` promises to a program that imports it."""

from __future__ import annotations

import subprocess
import sys

import minipaged.engine


def test_the_names_of_the_contract_come_from_the_package() -> None:
    from minipaged.engine import Engine, EngineConfig, EngineStats, Runner, StepPlan, StepResult
    from minipaged.engine.config import EngineConfig as InConfig
    from minipaged.engine.engine import Engine as InEngine

    assert Engine is InEngine
    assert EngineConfig is InConfig
    assert {EngineStats.__module__, Runner.__module__} == {"minipaged.engine.config", "minipaged.engine.plan"}
    assert {StepPlan.__name__, StepResult.__name__} == {"StepPlan", "StepResult"}


def test_every_listed_name_exists() -> None:
    for name in minipaged.engine.__all__:
        assert getattr(minipaged.engine, name).__name__ == name


def test_scheduling_needs_no_torch() -> None:
    """An engine around somebody's own runner can be built and imported without loading torch."""
    code = "import sys; from minipaged.engine import *; Engine, EngineConfig; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
