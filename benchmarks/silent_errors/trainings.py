"""Small trainings with a silent error, each as a separate run.

Run: torchrun -m benchmarks.silent_errors.trainings NAME ...

Two ranks classify the sums of their inputs on the CPU, with the probe as a user attaches it. Each
function trains with the error, or with `wrong=False` its healthy twin, `NAME/healthy`; the probe is
not given which.
"""

import sys
import time

import torch
import torch.distributed as dist

import mp_agent
from benchmarks.silent_errors import base, data, loops, parameters, ranks, recipes

ERRORS = {
    name: error
    for group in base.GROUPS
    for part in (loops, parameters, ranks, data, recipes)
    for name, error in base.ERRORS.items()
    if error.group == group and error.train.__module__ == part.__name__
}


def main() -> None:
    """Run the named trainings, one after the other."""
    dist.init_process_group("gloo")
    for name in sys.argv[1:]:
        error, _, twin = name.partition("/")
        mp_agent.init(run=name.replace("/", "-"))
        torch.manual_seed(1)
        base.CHANCE.manual_seed(1 + dist.get_rank())
        ERRORS[error].train(not twin)
        mp_agent.shutdown()
        # Gloo's threads need a moment after the last backward.
        time.sleep(0.1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
