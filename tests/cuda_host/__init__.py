"""CUDA without a device: torch's real host code over a runtime that counts kernels and runs none (``stub``)."""
