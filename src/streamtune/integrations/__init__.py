"""Trainers of others: streaming as a callback of the Hugging Face ``Trainer`` and of TRL's."""

from streamtune.integrations.trainer import StreamTuneCallback

__all__ = ["StreamTuneCallback"]
