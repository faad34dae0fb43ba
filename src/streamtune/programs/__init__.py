"""Commands besides training, such as benchmarks, evaluation and export. Training code does not import this package."""
