"""The oracle hands out Hugging Face's own numbers under the right names."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import torch
from verify_sample import PROMPTS

import minipaged
from minipaged.verify.oracle import follow, greedy, hf_model, trace
from tiny import hf_logits, load_hf, make_tiny_folder, random_tokens


def test_traced_queries_keys_and_values_give_the_traced_attention(sample):
    """float64 attention over the traced q, k, v equals the traced output: names are right, RoPE and scale included."""
    reference, Hq, Hkv, D = sample.reference, 4, 2, 32
    start = 0
    for prompt in PROMPTS:
        rows = slice(start, start + len(prompt))
        start += len(prompt)
        for layer in range(2):
            query = reference.values[layer, "q_rope"][rows].double().view(-1, Hq, D)
            key = reference.values[layer, "k_rope"][rows].double().view(-1, Hkv, D)
            value = reference.values[layer, "v_proj"][rows].double().view(-1, Hkv, D)
            expected = reference.values[layer, "attention"][rows].view(-1, Hq, D)
            for position in range(len(prompt)):
                for head in range(Hq):
                    kv = head // (Hq // Hkv)
                    weights = (key[: position + 1, kv] @ query[position, head] / math.sqrt(D)).softmax(0)
                    result = weights @ value[: position + 1, kv]
                    assert torch.allclose(result.float(), expected[position, head], atol=2e-6)


def test_trace_is_complete_and_its_residual_stream_adds_up(sample):
    values = sample.reference.values
    assert torch.allclose(values[0, "hidden_in"], values[-1, "embedding"])
    for layer in range(2):
        assert torch.allclose(
            values[layer, "hidden_in"] + values[layer, "o_proj"], values[layer, "hidden_mid"], atol=1e-6
        )
        assert torch.allclose(
            values[layer, "hidden_mid"] + values[layer, "mlp_down"], values[layer, "hidden_out"], atol=1e-6
        )
    assert torch.allclose(values[1, "hidden_in"], values[0, "hidden_out"])
    assert values[2, "final_norm"].shape == (sum(map(len, PROMPTS)), 64)


def test_trace_leaves_hugging_face_as_it_was(sample):
    from transformers.models.qwen3 import modeling_qwen3

    before = modeling_qwen3.eager_attention_forward
    with hf_model(sample.folder, torch.float32) as model:
        logits = trace(model, PROMPTS).logits
        again = torch.cat([model(torch.tensor([prompt])).logits[0] for prompt in PROMPTS])
    assert modeling_qwen3.eager_attention_forward is before
    assert torch.equal(logits, again)


def test_greedy_path_is_hugging_faces_own(sample):
    """Tokens equal an uncached loop over Hugging Face, margins are those of its logits."""
    model = load_hf(sample.folder)
    with hf_model(sample.folder, torch.float32) as ours:
        path = greedy(ours, PROMPTS[0], 8)
        forced = follow(ours, path)
        shaken = [follow(ours, path, jitter=size).logits for size in (1e-3, 1e-2)]
        again = follow(ours, path)
    history = list(PROMPTS[0])
    for step, token in enumerate(path.tokens):
        row = hf_logits(model, history)[-1]
        assert token == int(row.argmax())
        best = row.topk(2).values
        assert abs(path.margins[step] - float(best[0] - best[1])) < 1e-4
        assert torch.allclose(path.logits[step], row, atol=1e-4)
        history.append(token)
    assert torch.allclose(forced.logits, path.logits, atol=1e-4)
    assert forced.tokens == path.tokens
    assert torch.equal(again.logits, forced.logits)
    small, large = ((logits - forced.logits).norm() / forced.logits.norm() for logits in shaken)
    assert 1e-4 < small < 1e-2
    assert 5 < large / small < 20  # the logits move in proportion


def test_greedy_goes_on_after_an_end_of_text_token(tmp_path):
    prompt = random_tokens(5)
    folder = make_tiny_folder(tmp_path)
    first = int(hf_logits(load_hf(folder), prompt)[-1].argmax())
    folder = make_tiny_folder(tmp_path, eos_token_id=first)
    with hf_model(folder, torch.float32) as model:
        path = greedy(model, prompt, 6)
    assert path.tokens[0] == first
    assert len(path.tokens) == 6


def test_only_the_oracle_imports_transformers():
    package = Path(minipaged.__file__).parent
    importers = set()
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] == "transformers" for name in names):
                importers.add(str(file.relative_to(package)))
    assert importers == {"verify/oracle.py"}
