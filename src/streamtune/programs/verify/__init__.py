"""Compare a streamed gradient with plain autograd's, and both with a float64 gradient."""
