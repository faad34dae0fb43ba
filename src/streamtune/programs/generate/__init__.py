"""Generate text with a trained model, from prompts on the command line, in a file or in the terminal."""
