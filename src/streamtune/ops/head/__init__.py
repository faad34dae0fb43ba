"""The language-model head: losses and log-probabilities of tokens, without logits of the whole sequence."""
