"""The memory of tensors that wait for the backward: device, host or disk."""
