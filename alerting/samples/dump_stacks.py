"""Let a hung rank say where it stands: `kill -USR1 PID` prints the stack of every thread.

For a process that was started without this: `py-spy dump --pid PID`.
"""

import faulthandler
import os
import signal
from datetime import timedelta

import torch.distributed as dist

faulthandler.register(signal.SIGUSR1, all_threads=True)  # at the top of the training script


def join_ranks() -> None:
    """Join the process group; a rank that is lost then ends the job instead of hanging it."""
    dist.init_process_group(timeout=timedelta(minutes=10))


os.kill(os.getpid(), signal.SIGUSR1)  # what `kill -USR1` does; the stacks are on standard error
