"""Recipes of other trainers (axolotl, LLaMA-Factory, TRL, ms-swift) in our keys."""
