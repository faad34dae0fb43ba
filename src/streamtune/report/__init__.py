"""A page about one run or several: one HTML file without references to anything else."""

from __future__ import annotations

from streamtune.report.page import render_page
from streamtune.report.records import RunRecords, read_run

__all__ = ["RunRecords", "read_run", "render_page"]
