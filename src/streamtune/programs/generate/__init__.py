"""Generation with a trained model: prompts from the command line, a file or a terminal."""
