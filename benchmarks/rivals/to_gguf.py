"""Converts a Qwen3 folder (bf16, one safetensors file) to GGUF. Usage: to_gguf.py FOLDER OUT bf16|q8_0"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType, quants

TYPES = {"bf16": (GGMLQuantizationType.BF16, 32), "q8_0": (GGMLQuantizationType.Q8_0, 7)}
LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def add_hyperparameters(writer: gguf.GGUFWriter, config: dict, file_type: int) -> None:
    writer.add_name("qwen3-random")
    writer.add_file_type(file_type)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config.get("rope_theta") or config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def add_tokenizer(writer: gguf.GGUFWriter, config: dict, tokenizer: dict) -> None:
    tokens = [f"<unused{i}>" for i in range(config["vocab_size"])]
    types = [gguf.TokenType.UNUSED] * config["vocab_size"]
    for text, index in tokenizer["model"]["vocab"].items():
        tokens[index], types[index] = text, gguf.TokenType.NORMAL
    for added in tokenizer["added_tokens"]:
        tokens[added["id"]], types[added["id"]] = added["content"], gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_add_bos_token(False)


class Bf16File:
    """Tensors of a safetensors file as float32; numpy has no bfloat16, so the header is read by hand."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        length = int.from_bytes(self._file.read(8), "little")
        self._header = json.loads(self._file.read(length))
        self._start = 8 + length

    def tensor(self, name: str) -> np.ndarray:
        entry = self._header[name]
        if entry["dtype"] != "BF16":
            raise ValueError(f"{name} is {entry['dtype']}, expected BF16")
        begin, end = entry["data_offsets"]
        self._file.seek(self._start + begin)
        bits = np.frombuffer(self._file.read(end - begin), np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32).reshape(entry["shape"])


def main(folder: Path, out: str, kind: str) -> None:
    quantization, file_type = TYPES[kind]
    config = json.loads((folder / "config.json").read_text())
    weights = Bf16File(folder / "model.safetensors")
    writer = gguf.GGUFWriter(out, "qwen3")
    add_hyperparameters(writer, config, file_type)
    add_tokenizer(writer, config, json.loads((folder / "tokenizer.json").read_text()))

    def put(target: str, source: str) -> None:
        tensor = weights.tensor(source)
        if tensor.ndim == 1:
            writer.add_tensor(target, tensor)
        else:
            writer.add_tensor(target, quants.quantize(tensor, quantization), raw_dtype=quantization)

    put("token_embd.weight", "model.embed_tokens.weight")
    for layer in range(config["num_hidden_layers"]):
        for source, target in LAYER_NAMES.items():
            put(f"blk.{layer}.{target}.weight", f"model.layers.{layer}.{source}.weight")
    put("output_norm.weight", "model.norm.weight")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
