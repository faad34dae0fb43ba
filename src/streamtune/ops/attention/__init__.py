"""Attention of a chunk over its prefix and itself: kernels, masks, and ranks that share a sequence."""
