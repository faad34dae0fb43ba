"""Small helpers that every room may use: paths, sizes, names, secrets, caches, signals. Nothing here imports torch."""
