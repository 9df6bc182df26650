"""Qwen3 from a Hugging Face folder: configuration, weights, and the forward pass on top of a `Backend`."""
