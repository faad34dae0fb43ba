"""Reinforcement learning from rewards: sampling and scoring of completions, advantages, micro-batches."""
