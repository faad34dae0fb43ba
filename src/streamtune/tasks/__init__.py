"""The part of a run that depends on its objective: sft, dpo, grpo."""
