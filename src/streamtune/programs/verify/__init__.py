"""Compare the streamed gradient with plain autograd's, and both with a gradient in a wider dtype."""
