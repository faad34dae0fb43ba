"""Command ``streamtune bench``: compare the memory and speed of training methods, each in its own process."""
