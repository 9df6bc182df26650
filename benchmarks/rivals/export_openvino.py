"""Exports a model folder to OpenVINO IR with bf16 weights. Usage: export_openvino.py FOLDER OUT"""

from __future__ import annotations

import sys

import openvino
import torch
from openvino_tokenizers import convert_tokenizer
from optimum.intel import OVModelForCausalLM
from transformers import AutoTokenizer


def main(folder: str, out: str) -> None:
    model = OVModelForCausalLM.from_pretrained(
        folder, export=True, compile=False, local_files_only=True, load_in_8bit=False, torch_dtype=torch.bfloat16
    )
    model.save_pretrained(out)
    tokenizer, detokenizer = convert_tokenizer(AutoTokenizer.from_pretrained(folder), with_detokenizer=True)
    openvino.save_model(tokenizer, f"{out}/openvino_tokenizer.xml")
    openvino.save_model(detokenizer, f"{out}/openvino_detokenizer.xml")


if __name__ == "__main__":
    main(*sys.argv[1:])
