"""Several ranks: started, watched and ended together. Importing it loads no torch.

environment   which rank this process is, by the variables of its launcher
launch        --nproc and --hostfile: ranks of this machine (ranks) and, over ssh, of others (remote, agent)
failure       what a rank that fails leaves behind, and which of several failures came first
logs          the output of ranks other than 0
agree         before training: the same versions, recipe and data on every rank, and each reaches the others
watchdog      while training: a rank that is gone, stands still or cannot be reached ends all the others
"""

from __future__ import annotations

from streamtune.distributed.agree import agree
from streamtune.distributed.environment import RankEnvironment, read_environment
from streamtune.distributed.launch.launch import launch
from streamtune.distributed.launch.ranks import die_with_launcher, keep_log, leave_terminal
from streamtune.distributed.watch.failure import Failure, write_failure
from streamtune.distributed.watch.watchdog import Watchdog

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
