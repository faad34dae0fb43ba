"""Convert recipes of other trainers (axolotl, LLaMA-Factory, TRL, ms-swift) to StreamTune recipes."""
