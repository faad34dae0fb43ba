"""Choose the rows of each step, and collate them to tensors."""
