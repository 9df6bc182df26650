"""The prompts of these tests: lengths that are no multiple of a block size."""

from tiny import random_tokens

PROMPTS = [random_tokens(22, seed=1), random_tokens(13, seed=2)]
