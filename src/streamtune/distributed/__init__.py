"""Start, watch and end the ranks (processes) of a distributed run. Importing this package does not import torch.

environment   rank and world size of this process, from its launcher's environment variables launcher      ``--nproc``
and ``--hostfile``: start ranks on this machine (local_ranks) and over ssh (remote_ranks) failure       errors of ranks,
and which rank failed first agree         checks before training: equal versions, recipe and data, and machines that can
connect to each other watchdog      during training, ends all ranks if one is dead, hangs or is unreachable pytorch
process group, DDP and FSDP2 deepspeed     ZeRO
"""

from __future__ import annotations

from streamtune.distributed.agree import check_ranks_agree
from streamtune.distributed.environment import RankEnvironment, read_environment
from streamtune.distributed.failure import Failure, write_failure
from streamtune.distributed.launcher import launch
from streamtune.distributed.local_ranks import die_with_launcher, move_log_to_run, redirect_rank_output
from streamtune.distributed.watchdog import Watchdog

__all__ = [
    "Failure",
    "RankEnvironment",
    "Watchdog",
    "check_ranks_agree",
    "die_with_launcher",
    "launch",
    "move_log_to_run",
    "read_environment",
    "redirect_rank_output",
    "write_failure",
]
