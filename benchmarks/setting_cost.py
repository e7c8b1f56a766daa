"""What a setting adds to a training step: the probe as it is, and with that setting.

The transformer of `training` is trained in one process, in turns of a few steps with each probe, in
ABBA order; both see the same machine. What `guard`, `reduction` and `measure_local_gradients` cost
depends on the process group: under torchrun the model is trained with DDP, on gloo.

    python -m benchmarks.setting_cost measure_step_parts=true [--pairs N]
    torchrun --standalone --nproc-per-node 2 -m benchmarks.setting_cost guard=true
"""

import argparse
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.machine import describe, markdown
from benchmarks.step_overhead import HEADER, Comparison, make_probe
from benchmarks.training import Training, add_arguments, chosen_training
from mp_agent.settings import Settings

_STEPS_PER_TURN = 6


def seconds_per_step(
    training: Training, device: torch.device, directory: Path, settings: Mapping[str, Any]
) -> float:
    """Return the time of a step in one turn, after one that only prepares."""

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    probe = make_probe(directory, **settings)
    probe.attach()
    training.step(lambda: None)
    finish()
    start = perf_counter()
    for _ in range(_STEPS_PER_TURN):
        training.step(lambda: None)
    finish()
    seconds = (perf_counter() - start) / _STEPS_PER_TURN
    probe.detach()
    return seconds


def compare(
    training: Training, device: torch.device, directory: Path, chosen: Mapping[str, Any], pairs: int
) -> Comparison:
    """Time steps without and with chosen settings."""
    without: list[float] = []
    with_setting: list[float] = []
    for pair in range(pairs + 1):
        for settings in ({}, chosen) if pair % 2 else (chosen, {}):
            seconds = seconds_per_step(training, device, directory, settings)
            (with_setting if settings else without).append(seconds)
    what = ", ".join(f"`{name}={json.dumps(value)}`" for name, value in chosen.items())
    return Comparison(f"{what}: {training.what}", without[1:], with_setting[1:])


def parsed(text: str) -> Mapping[str, Any]:
    """Return a setting given as `name=value`. Raises ArgumentTypeError for what is none."""
    name, _, value = text.partition("=")
    try:
        chosen = {name: json.loads(value)}
        Settings(**chosen)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no setting: {error}") from None
    return chosen


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add_arguments(parser)
    parser.add_argument(
        "settings", nargs="+", type=parsed, help="such as guard=true; the value is JSON"
    )
    parser.add_argument("--pairs", type=int, default=20)
    arguments = parser.parse_args()
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    training = chosen_training(arguments)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        rows = [
            compare(training, arguments.device, Path(directory), chosen, arguments.pairs).cells()
            for chosen in arguments.settings
        ]
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"{describe(arguments.device)}\n\n{markdown(HEADER, rows)}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
