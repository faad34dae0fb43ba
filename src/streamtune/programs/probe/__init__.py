"""Command ``streamtune probe-max-len``: find the longest sequence that trains in the available memory."""
