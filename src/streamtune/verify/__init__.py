"""Compare a streamed gradient with that of plain autograd, and both with a float64 one."""

from streamtune.verify.report import VerifyReport
from streamtune.verify.verify import compare_gradients, verify_schedules

__all__ = ["VerifyReport", "compare_gradients", "verify_schedules"]
