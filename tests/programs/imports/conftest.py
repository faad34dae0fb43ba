"""The fixtures of recipes, for tests that compare other trainers' keys with ours."""

from __future__ import annotations

from tests.recipe.conftest import refused, write  # noqa: F401
