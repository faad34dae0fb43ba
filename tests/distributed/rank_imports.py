"""The libraries that ranks import: multiprocessing's fork server imports this module once, for all ranks of a process.

Nothing here may start a thread or a process group: a fork would have them in part.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import peft  # noqa: F401
import transformers.modeling_utils  # noqa: F401

# DeepSpeed compiles an operator for shared memory at its first group: minutes. Ranks that are killed meanwhile leave
# a lock that all later ones wait for.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
