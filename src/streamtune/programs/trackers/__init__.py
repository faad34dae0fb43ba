"""Experiment trackers: TensorBoard, Weights & Biases, MLflow and Trackio, each through its own package.

installed   is the package of each tracker in `report_to` here? asked before anything heavy is loaded
reporter    a listener that hands everything to one tracker, on a thread of its own
tracker     the contract of a tracker, and how values are named
to_*        one tracker each
"""
