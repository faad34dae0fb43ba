"""Experiment trackers: TensorBoard, Weights & Biases, MLflow and Trackio, each through its own package.

services    contract and trackers, and the check that their packages are installed
reporter    listener that passes everything to one tracker, on its own thread
"""
