"""Command ``streamtune verify``: check that streaming gives the same loss and gradients as plain autograd."""
