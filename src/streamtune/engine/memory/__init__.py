"""Storage of tensors until the backward: on the device, on the host, or on disk."""
