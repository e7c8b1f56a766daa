"""A training whose gradient becomes NaN at an unannounced step: `training.py DIRECTORY STEPS`.

It begins to count its steps when DIRECTORY/go is there, and writes what it knows to planted.json:
when the NaN was written, and when a check in the loop itself saw it.
"""

import json
import sys
import time
from pathlib import Path

import torch
from torch import nn

import mp_agent

STEP_SECONDS = 0.05


def main() -> None:
    """Train until DIRECTORY/stop is there."""
    directory, planted_step = Path(sys.argv[1]), int(sys.argv[2])
    mp_agent.init()
    recorded: dict[str, float] = {}

    def record(event: mp_agent.ConditionEvent) -> None:
        recorded.setdefault("callback_unix_seconds", time.time())
        recorded.setdefault("callback_step", event.step)
        (directory / "callback.json").write_text(json.dumps(recorded))

    mp_agent.on_condition(record)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    counted = 0
    while not (directory / "stop").exists():
        counted += (directory / "go").exists()
        optimizer.zero_grad()
        torch.autograd.backward(model(torch.randn(32, 64)).square().mean())
        if counted == planted_step:
            counted += 1
            _plant(model, directory)
        optimizer.step()
        time.sleep(STEP_SECONDS)


def _plant(model: nn.Module, directory: Path) -> None:
    parameter = next(model.parameters())
    assert parameter.grad is not None
    planted = time.time()
    parameter.grad[0, 0] = float("nan")
    finite = all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
    assert not finite
    facts = {"planted_unix_seconds": planted, "checked_unix_seconds": time.time()}
    (directory / "planted.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
