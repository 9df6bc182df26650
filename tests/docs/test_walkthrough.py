"""The walkthrough's code runs from top to bottom and prints what the page says, in both languages."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ["walkthrough.md", "walkthrough.zh.md"]
FENCE = re.compile(r"^```(.*)\n((?s:.*?))^```$", re.MULTILINE)
VARIES = "text (varies)"


@dataclass
class Step:
    """A block of code, the line it starts at, and the box below it: None = no box, hence nothing to print."""

    code: str
    line: int
    box: str | None = None
    varies: bool = False


def steps_of(text: str) -> list[Step]:
    steps: list[Step] = []
    end_of_code = -1
    for fence in FENCE.finditer(text):
        kind, body = fence[1], fence[2]
        if kind == "python":
            steps.append(Step(body, text.count("\n", 0, fence.start()) + 1))
            end_of_code = fence.end()
        else:
            assert kind in ("text", VARIES), f"a block marked {kind!r} is neither code nor its output"
            assert not text[end_of_code : fence.start()].strip(), f"an output without code above it: {body!r}"
            steps[-1].box, steps[-1].varies = body, kind == VARIES
    return steps


@pytest.mark.parametrize("page", PAGES)
def test_every_block_prints_what_the_page_says(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    steps = steps_of((DOCS / page).read_text(encoding="utf-8"))
    assert len(steps) > 30
    assert sum(step.varies for step in steps) == 1  # the two times of step 1, and nothing else, escape the comparison
    namespace: dict[str, object] = {"__name__": page}
    for step in steps:
        exec(compile("\n" * step.line + step.code, str(DOCS / page), "exec"), namespace)
        printed = capsys.readouterr().out
        where = f"{page}, line {step.line}"
        if step.varies:
            shape = [re.sub(r"\d+\.\d", "0.0", words) for words in (printed, str(step.box))]
            assert shape[0] == shape[1] != printed, where
        else:
            assert printed == (step.box or ""), where


def test_both_languages_have_the_same_steps_code_and_outputs() -> None:
    texts = [(DOCS / page).read_text(encoding="utf-8") for page in PAGES]
    english, chinese = ([(step.code, step.varies or step.box) for step in steps_of(text)] for text in texts)
    assert english == chinese
    # "## 3. Title (article 3 and 4.1; panel 1)": the same numbers of step, sections and panel in both
    headings = [re.findall(r"^## (\d.*)$", text, re.MULTILINE) for text in texts]
    numbers = [[re.findall(r"\d+(?:\.\d+)?", heading) for heading in each] for each in headings]
    assert numbers[0] == numbers[1]
    assert [heading[0] for heading in numbers[0]] == [str(step) for step in range(1, 19)]
    assert all(len(heading) >= 2 for heading in numbers[0])


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_the_page_names_exists(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith("https://")]
    assert len(links) == 2  # the other language and the figure
    for link in links:
        assert (DOCS / link).is_file(), link
    paths = re.findall(r"`((?:src/)?minipaged/[\w/]+\.py)`", text)
    assert len(paths) > 6
    for path in paths:
        assert (DOCS.parent / "src" / path.removeprefix("src/")).is_file(), path
