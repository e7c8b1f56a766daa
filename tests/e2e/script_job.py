"""A job with a mistake in its project: torchrun script_job.py DIRECTORY, until DIRECTORY/stop."""

import sys
import time
from pathlib import Path

import torch
from script_job_step import make_step  # type: ignore[import-not-found]
from torch import nn

import mp_agent


def main() -> None:
    mp_agent.init(check_script=True)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    step = make_step(model, optimizer)
    while not (Path(sys.argv[1]) / "stop").exists():
        step(model(torch.ones(4, 8)).mean())
        time.sleep(0.05)


if __name__ == "__main__":
    main()
