"""`verify_model` and the command: engine and Hugging Face side by side, broken engines, JSON, HTML, exit status."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from broken_backends import LeaksBetweenRows, NaNLogits, OneWrongSlot, SaysInvariant, TiledHeads, UpperLeftMask
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner
from verify_sample import PROMPTS

from minipaged.cli.main import app
from minipaged.engine.scheduler import Scheduler
from minipaged.errors import CheckpointError
from minipaged.model.qwen3 import Qwen3Model
from minipaged.model.weights import load_folder
from minipaged.ops.backend import Backend
from minipaged.ops.registry import get_backend
from minipaged.ops.torch.backend import TorchBackend
from minipaged.sampling.sampler import Sampler
from minipaged.verify import determinism
from minipaged.verify.determinism import PROMISE, check_determinism
from minipaged.verify.html import render
from minipaged.verify.judge import LOGIT_TOLERANCE
from minipaged.verify.oracle import GreedyPath, follow
from minipaged.verify.run import choose_backend, verify_model
from tiny import make_tiny_folder

TOKENS = 8


@pytest.fixture
def use(monkeypatch):
    """use(backend): what the registry hands out from now on."""

    def choose(backend: Backend) -> None:
        monkeypatch.setattr("minipaged.verify.run.get_backend", lambda name, device: backend)

    return choose


def check(sample: Any, **options: Any) -> Any:
    options = {"block_size": 4, "num_tokens": TOKENS, "prompts": PROMPTS, "threads": 1, "backend": "torch", **options}
    return verify_model(sample.folder, **options)


def invoke(sample: Any, *arguments: str) -> Any:
    return CliRunner().invoke(
        app, ["verify", str(sample.folder), *["--backend", "torch", "--threads", "1", "--max-tokens", "4"], *arguments]
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_right_engine_passes_and_every_token_is_counted(sample, dtype):
    report = check(sample, dtype=dtype)
    assert report.bugs == []
    assert len(report.tokens) == len(PROMPTS) * TOKENS
    assert [(token.prompt, token.position) for token in report.tokens] == [
        (index, len(prompt) + step) for index, prompt in enumerate(PROMPTS) for step in range(TOKENS)
    ]
    if dtype == "float32":
        assert max(token.relative for token in report.tokens) < 1e-5
        assert all(token.verdict == "equal" for token in report.tokens if token.margin > 1e-3)


@pytest.mark.parametrize("broken", [TiledHeads, UpperLeftMask, OneWrongSlot])
def test_broken_kernels_show_in_tokens_as_well_as_in_layers(sample, use, broken):
    use(broken())
    report = check(sample)
    assert not report.passed
    assert report.bugs[0].kind == "op"
    assert {"op", "token"} <= {bug.kind for bug in report.bugs}


def test_logits_that_cannot_be_sampled_are_a_bug_and_not_a_crash(sample, use):
    use(NaNLogits())
    report = check(sample)
    assert [token.verdict for token in report.tokens] == ["bug"] * len(PROMPTS) * TOKENS
    assert {token.chosen for token in report.tokens} == {-1}
    assert report.bugs[0].op == "logits"


def test_one_wrong_choice_does_not_spoil_the_tokens_after_it(sample, monkeypatch):
    """Teacher forcing: a sampler that errs once makes one bug, and the following tokens still equal Hugging Face's."""
    calls = []
    honest = Sampler.sample

    def errs_once(self: Sampler, logits: Any, sequences: Any) -> Any:
        samples = honest(self, logits, sequences)
        calls.append(len(samples))
        if len(calls) == 3:
            samples[0].token_id = (samples[0].token_id + 1) % 320
        return samples

    monkeypatch.setattr(Sampler, "sample", errs_once)
    report = check(sample)
    assert [token.verdict for token in report.tokens].count("bug") == 1
    assert [bug.kind for bug in report.bugs] == ["token"]


def test_a_scheduler_that_skips_a_token_is_found(sample, monkeypatch):
    """Kernels are right, so only the tokens of the real decode path can show it."""
    honest = Scheduler.schedule

    def skips(self: Scheduler) -> Any:
        plan = honest(self)
        for row in plan.rows:
            if row.num_tokens == 1 and row.start > len(PROMPTS[0]) + 2:
                row.slots = [row.slots[0] - 1]  # writes over its predecessor; its own slot stays NaN
        return plan

    monkeypatch.setattr(Scheduler, "schedule", skips)
    report = check(sample)
    assert all(result.passed for result in report.ops)
    assert report.bugs[0].kind == "token"
    assert report.bugs[0].position == len(PROMPTS[0]) + 4


def test_an_engine_that_raises_is_a_bug(sample, use):
    class Raises(TorchBackend):
        def attention(self, *args: Any, **options: Any) -> Any:
            if len(args[0]) == 2 and args[2].batch.max_seq_len > len(PROMPTS[0]):
                raise RuntimeError("kernel failed")
            return super().attention(*args, **options)

    use(Raises())
    report = check(sample)
    assert "kernel failed" in report.bugs[-1].message


# -- determinism


@pytest.fixture
def no_child_process(monkeypatch):
    """Other thread counts need a process of their own: slow, and it would not know a broken back end."""
    monkeypatch.setattr(determinism, "_threads", lambda *_: iter(()))


def load(sample: Any, backend: Backend) -> Qwen3Model:
    return load_folder(sample.folder, backend, dtype="float32", progress=False)


def claims_of(sample: Any, backend: Backend) -> list[Any]:
    return check_determinism(load(sample, backend), sample.folder, PROMPTS, TOKENS)


def test_the_torch_back_end_stays_within_the_promise(sample):
    """Every way is really taken (a count shows it), other thread counts included, and every row is compared."""
    model = load(sample, TorchBackend())
    claims = check_determinism(model, sample.folder, PROMPTS, TOKENS)
    ways = {"in a batch", "chunked prefill", "block size", "placement", "prefix hit", "preempted", "threads"}
    assert {claim.name for claim in claims} == ways
    for claim in claims:
        assert claim.passed, claim
        assert claim.rows_compared == len(PROMPTS) * TOKENS
        assert claim.max_abs <= claim.limit == PROMISE


@pytest.mark.usefixtures("no_child_process")
def test_logits_that_depend_on_batch_mates_break_the_promise(sample):
    broken = {claim.name for claim in claims_of(sample, LeaksBetweenRows()) if not claim.passed}
    assert "in a batch" in broken
    assert "block size" not in broken


@pytest.mark.usefixtures("no_child_process")
def test_a_back_end_that_promises_equal_bits_is_held_to_them(sample):
    claims = claims_of(sample, SaysInvariant())
    batch = [claim for claim in claims if claim.name == "in a batch"]
    assert all(claim.limit == 0 for claim in claims)
    assert batch
    assert not any(claim.passed for claim in batch)
    assert all(0 < claim.max_abs < 1e-4 for claim in batch)  # the float32 promise alone would have let it pass


@pytest.mark.usefixtures("no_child_process")
def test_a_way_that_was_not_taken_is_a_failure(sample):
    """One request cannot meet another one: the claim about batches is not made true by that."""
    model = load(sample, TorchBackend())
    claims = check_determinism(model, sample.folder, PROMPTS[:1], TOKENS)
    batch = [claim for claim in claims if claim.name == "in a batch"]
    assert [(claim.passed, claim.rows_compared) for claim in batch] == [(False, 0), (False, 0)]


# -- the command


def test_json_is_one_object_and_nothing_else(sample):
    result = invoke(sample, "--json")
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    assert content["passed"] is True
    assert (content["layers"], content["tokens_compared"], content["bugs"]) == (2, 8, 0)
    assert content["near_ties"] == sum(token["verdict"] == "near tie" for token in content["tokens"])


def test_a_bug_is_exit_status_1_and_is_named(sample, use):
    use(TiledHeads())
    result = invoke(sample)
    assert result.exit_code == 1
    assert "layer 0, attention" in result.stdout
    assert "\x1b" not in result.stdout  # no colours into a pipe
    assert "error:" not in result.stderr  # the report says it all
    result = invoke(sample, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["bug_details"][0]["op"] == "attention"


@pytest.mark.parametrize(
    "arguments",
    [
        ("--dtype", "float16"),
        ("--block-size", "0"),
        ("--html", "/nowhere/at/all.html"),
        ("--max-tokens", "0"),
        ("--nonsense",),
    ],
)
def test_wrong_usage_is_exit_status_2(sample, arguments):
    result = invoke(sample, *arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def test_help_shows_an_example():
    result = CliRunner().invoke(app, ["verify", "--help"])
    assert result.exit_code == 0
    assert "minipaged verify ./" in result.output


def test_a_folder_without_a_model_is_an_error_in_one_line(tmp_path):
    result = CliRunner().invoke(app, ["verify", str(tmp_path)])
    assert result.exit_code != 0
    assert "config.json" in result.output
    assert "Traceback" not in result.output


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attributes if name in ("src", "href", "xlink:href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_html_is_one_well_formed_file_that_loads_nothing(sample, tmp_path):
    file = tmp_path / "report.html"
    result = invoke(sample, "--html", str(file))
    assert result.exit_code == 0, result.output
    text = file.read_text(encoding="utf-8")
    page = _Page()
    page.feed(text)
    assert page.open == []
    assert page.links == []
    assert "url(" not in text
    assert "http" not in text
    assert page.tags.count("svg") == 3  # layers, and positions of two prompts
    assert "prefers-color-scheme: dark" in text
    assert "passed" in text
    assert torch.__version__ in text


def test_html_of_a_broken_engine_draws_infinite_errors(sample, use):
    use(OneWrongSlot())
    text = render(check(sample, dtype="float32"))
    assert "layer 0, kv_write" in text
    assert "infinite" in text
    numbers = re.findall(r'points="([^"]*)"', text)
    assert numbers
    assert not any("nan" in points or "inf" in points for points in numbers)


# -- requests that make no sense


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float16"}, "float32 and bfloat16"),
        ({"prompts": [[1, 320]]}, "320 of a prompt is outside the vocabulary"),
        ({"prompts": [[1, 2], [1, 2]]}, "each different"),
        ({"prompts": [[1]]}, "at least 2 tokens"),
        ({"prompts": [[1] * 508], "num_tokens": 8}, "context of 512"),
    ],
)
def test_requests_that_make_no_sense_are_refused(sample, options, message):
    with pytest.raises(ValueError, match=message):
        check(sample, **options)


def test_the_model_is_refused_before_hugging_face_loads_it(sample, tmp_path, monkeypatch):
    """A missing tensor, which Hugging Face would fill with random numbers, or a back end that cannot run here."""
    monkeypatch.setattr("minipaged.verify.run.hf_model", lambda *_: pytest.fail("Hugging Face was asked"))
    for name in ("config.json", "model.safetensors"):
        shutil.copy(sample.folder / name, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=re.escape("model.norm.weight")):
        verify_model(tmp_path)
    with pytest.raises(ValueError, match="nonsense"):
        verify_model(sample.folder, backend="nonsense")


def test_auto_is_the_best_back_end_of_this_machine():
    assert (
        type(choose_backend("auto", "cpu")[0]) is type(choose_backend(None, "cpu")[0]) is type(get_backend(None, "cpu"))
    )


def test_a_model_that_amplifies_rounding_is_not_a_bug(sample, use, monkeypatch):
    """Where shaken layers move Hugging Face's own logits far, ours may be as far off."""

    class SlightlyOff(TorchBackend):
        def linear(self, x: Any, w: Any, **options: Any) -> Any:
            result = super().linear(x, w, **options)
            return result.mul_(1 + 10 * LOGIT_TOLERANCE) if w.out_features == 320 else result

    use(SlightlyOff())
    assert {bug.kind for bug in check(sample).bugs} == {"op", "logits", "token"}

    def noisy(model: Any, path: GreedyPath, *, jitter: float) -> GreedyPath:
        exact = follow(model, path)
        return replace(exact, logits=exact.logits * (1 + 2 * LOGIT_TOLERANCE))

    monkeypatch.setattr("minipaged.verify.run.follow", noisy)
    report = check(sample)
    assert report.logits_limit == pytest.approx(16 * LOGIT_TOLERANCE, rel=0.1)
    assert {bug.kind for bug in report.bugs} == {"op"}  # what one operation does alone is judged as strictly as ever


def test_a_short_context_shortens_the_default_prompts(tmp_path):
    folder = make_tiny_folder(tmp_path, max_position_embeddings=24)
    report = verify_model(folder, backend="torch", threads=1)
    assert report.passed
    assert [len(prompt) for prompt in report.prompts] == [12, 12]
    assert len(report.tokens) == 24
