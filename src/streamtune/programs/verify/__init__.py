"""Compare a streamed gradient with that of plain autograd, and both with a float64 one."""
