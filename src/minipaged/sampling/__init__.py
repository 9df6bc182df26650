"""From logits to tokens: edits of the logits, one uniform number per token, log-probabilities."""
