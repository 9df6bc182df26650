"""Qwen3 from a Hugging Face folder: configuration, weights, tokenizer, and the forward pass on top of a `Backend`."""
