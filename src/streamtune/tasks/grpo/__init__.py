"""Reinforcement learning from rewards: rollouts, groups, advantages, micro-batches."""
