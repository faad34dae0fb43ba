"""Transformers' common tests of models, for the family that ``FAMILY`` names; run by ``python -m tests.suites``."""

from __future__ import annotations

import os
import unittest
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers_tests.test_modeling_common import ModelTesterMixin

from tests.conformance.reducer import tiny_config

FAMILY = os.environ["FAMILY"]


class Tester:
    """What the common tests ask of a family's own: a tiny configuration, and tokens."""

    batch_size, seq_length, is_training = 2, 11, True

    def get_config(self) -> Any:
        """Return a tiny configuration."""
        return tiny_config(FAMILY)

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        """Return a configuration and the arguments of a call."""
        config = self.get_config()
        ids = torch.randint(3, 90, (self.batch_size, self.seq_length))
        return config, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def __getattr__(self, name: str) -> Any:
        found = getattr(tiny_config(FAMILY), name, None)
        if found is None:
            raise AttributeError(name)
        return found


class TestFamily(ModelTesterMixin, unittest.TestCase):
    """The common tests."""

    all_model_classes = (MODEL_FOR_CAUSAL_LM_MAPPING[type(tiny_config(FAMILY))],)

    def setUp(self) -> None:
        """Make what the tests ask for."""
        torch.manual_seed(0)
        self.model_tester = Tester()
