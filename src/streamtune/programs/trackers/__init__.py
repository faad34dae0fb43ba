"""Experiment trackers: TensorBoard, Weights & Biases, MLflow and Trackio.

``services`` has the four trackers and their common interface. ``reporter`` sends the metrics of a run to them.
"""
