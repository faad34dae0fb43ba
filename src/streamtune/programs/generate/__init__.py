"""Generate with a trained model: prompts come from the command line, a file or the terminal."""
