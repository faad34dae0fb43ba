"""StreamTune: fine-tune language models on sequences nobody else can fit, with the exact gradient."""
