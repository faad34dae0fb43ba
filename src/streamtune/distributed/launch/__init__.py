"""Start the ranks of a run, here or on other machines, and end them together."""
