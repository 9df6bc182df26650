"""A shape of a few thousand numbers, which the tests add to the published ones."""

from tiny import tiny_config

TINY_SHAPE = "qwen3-tiny"
TINY = tiny_config()
