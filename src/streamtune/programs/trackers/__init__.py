"""Experiment trackers: TensorBoard, Weights & Biases, MLflow and Trackio, each through its own package.

services    interface of a tracker, the four trackers, and the check that their packages are installed
reporter    listener that sends a run's records to one tracker, on its own thread
"""
