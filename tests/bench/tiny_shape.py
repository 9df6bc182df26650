"""A shape of a few thousand numbers, which the tests add to the published ones."""

from dataclasses import replace

from minipaged.model.random_weights import QWEN3_SHAPES

TINY_SHAPE = "qwen3-tiny"
TINY = replace(
    QWEN3_SHAPES["qwen3-0.6b"],
    vocab_size=320,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=512,
)
