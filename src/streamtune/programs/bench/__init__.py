"""Measure plain autograd, gradient checkpointing and streaming side by side, in processes of their own."""
