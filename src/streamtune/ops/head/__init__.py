"""The head: a loss or log-probs of tokens, without logits of the whole sequence."""
