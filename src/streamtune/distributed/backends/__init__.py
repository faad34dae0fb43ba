"""Backends of several ranks: DDP, FSDP2, DeepSpeed ZeRO."""
