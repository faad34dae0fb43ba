"""The libraries that ranks import: multiprocessing's fork server imports this module once, for all ranks of a process.

Nothing here may start a thread or a process group: a fork would have them in part.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed  # noqa: F401
import peft  # noqa: F401
import transformers.modeling_utils  # noqa: F401
