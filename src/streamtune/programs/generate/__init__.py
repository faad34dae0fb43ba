"""Try a trained model: prompts from the command line, a file or a terminal, answered as the tokens come."""
