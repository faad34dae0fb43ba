"""Attention of a chunk over earlier keys and its own keys: kernels, masks, and ring attention between ranks."""
