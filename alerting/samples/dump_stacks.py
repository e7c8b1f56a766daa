"""Let a hung rank say where it stands: `kill -USR1 PID` prints the stack of every thread.

For a process that was started without this: `py-spy dump --pid PID`.
"""

import faulthandler
import os
import signal
import sys
import tempfile

import torch.distributed as dist

with tempfile.TemporaryFile() as log:
    faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)  # file=sys.stderr in a job
    os.kill(os.getpid(), signal.SIGUSR1)
    log.seek(0)
    stacks = log.read().decode()
    faulthandler.unregister(signal.SIGUSR1)
assert os.path.basename(__file__) in stacks, sys.argv

# A rank that is lost should end the job after minutes, not hang it for ever.
if dist.is_torchelastic_launched():
    from datetime import timedelta

    dist.init_process_group(timeout=timedelta(minutes=10))
