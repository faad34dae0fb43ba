"""Write a trained model the way every other tool reads it: adapters merged, checked against the model as it trained."""

from streamtune.export.export import ExportOptions, ExportReport, export_model
from streamtune.export.source import TrainedModel, find_trained, load_trained, load_trained_tokenizer

__all__ = [
    "ExportOptions",
    "ExportReport",
    "TrainedModel",
    "export_model",
    "find_trained",
    "load_trained",
    "load_trained_tokenizer",
]
