"""Choose the prepared rows of each step, and collate them to tensors."""
