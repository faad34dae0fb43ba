"""Several ranks: started, watched and ended together. Importing it loads no torch.

environment   the rank of this process, by the variables of its launcher
launcher      --nproc and --hostfile: ranks of this machine (local_ranks) and, over ssh, of others (remote, agent)
failure       the errors of ranks, and which of several came first
agree         before training: the same versions, recipe and data on every rank, and each reaches the others
watchdog      while training: a rank that is gone, stands still or cannot be reached ends all the others
pytorch       the process group, DDP and FSDP2; ``deepspeed`` has ZeRO
"""

from __future__ import annotations

from streamtune.distributed.agree import agree
from streamtune.distributed.environment import RankEnvironment, read_environment
from streamtune.distributed.failure import Failure, write_failure
from streamtune.distributed.launcher import launch
from streamtune.distributed.local_ranks import die_with_launcher, keep_log, leave_terminal
from streamtune.distributed.watchdog import Watchdog

__all__ = [
    "Failure",
    "RankEnvironment",
    "Watchdog",
    "agree",
    "die_with_launcher",
    "keep_log",
    "launch",
    "leave_terminal",
    "read_environment",
    "write_failure",
]
