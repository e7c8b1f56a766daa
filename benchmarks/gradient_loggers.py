"""What a training step costs with mp_agent, and with other ways to log its gradients.

The transformer of `step_overhead` is trained in one process; in each round every way has a turn of
a few steps, forth and back, so that all see the same machine. A ratio is the median over rounds of
a turn to the bare one of its round, with the 90 % interval of the bootstrapped median. mp_agent and
`get_total_norm` give one norm per step (mp_agent all its columns, and layers when due), the others
a value per parameter. Lightning and wandb take part where they are installed: `.[benchmarks]`.

    python -m benchmarks.gradient_loggers [--device cuda] [--model NAME] [--precision NAME]
        [--rounds N] [--threads N]
"""

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from torch import nn
from torch.nn.utils import get_total_norm

from benchmarks.machine import describe, markdown
from benchmarks.step_overhead import interval, make_probe
from benchmarks.training import Training, add_arguments, chosen_training

STEPS_PER_TURN = 3
HEADER = ("a training step with", "step", "ratio to bare", "90 % interval", "added, of mp_agent's")


Turns = dict[str, list[float]]
"""Seconds per step of each way's turns."""

Logger = Callable[[Training, Path], AbstractContextManager[Callable[[], None]]]
"""Yields what to call in each step."""


@contextmanager
def _bare(training: Training, directory: Path) -> Iterator[Callable[[], None]]:
    yield _nothing


def _nothing() -> None:
    pass


@contextmanager
def _mp_agent(training: Training, directory: Path) -> Iterator[Callable[[], None]]:
    probe = make_probe(directory)
    probe.attach()
    try:
        yield _nothing
    finally:
        probe.detach()


@contextmanager
def _total_norm(training: Training, directory: Path) -> Iterator[Callable[[], None]]:
    norms: list[torch.Tensor] = []

    def log() -> None:
        norms[:] = [get_total_norm(_gradients(training.model))]

    yield log


@contextmanager
def _items(training: Training, directory: Path) -> Iterator[Callable[[], None]]:
    norms: dict[str, float] = {}

    def log() -> None:
        for name, parameter in training.model.named_parameters():
            if parameter.grad is not None:
                norms[name] = parameter.grad.norm().item()

    yield log


@contextmanager
def _lightning(training: Training, directory: Path) -> Iterator[Callable[[], None]]:
    grad_norm = import_module("lightning.pytorch.utilities").grad_norm

    def log() -> None:
        grad_norm(training.model, norm_type=2)

    yield log


@contextmanager
def _wandb(training: Training, directory: Path) -> Iterator[Callable[[], None]]:
    wandb = import_module("wandb")
    os.environ["WANDB_SILENT"] = "true"
    run = wandb.init(mode="offline", dir=directory, project="benchmark", reinit="finish_previous")
    run.watch(training.model, log="gradients", log_freq=1)
    try:
        yield lambda: run.log({})
    finally:
        run.unwatch(training.model)
        run.finish()


BARE = "nothing"

LOGGERS: dict[str, Logger] = {
    BARE: _bare,
    "mp_agent": _mp_agent,
    "get_total_norm": _total_norm,
    "`grad.norm().item()` of each parameter": _items,
    "Lightning's `grad_norm`": _lightning,
    "`wandb.watch(log_freq=1)`, offline": _wandb,
}
_NEEDS = {"Lightning's `grad_norm`": "lightning", "`wandb.watch(log_freq=1)`, offline": "wandb"}


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    return [each.grad for each in model.parameters() if each.grad is not None]


def measure(training: Training, device: torch.device, rounds: int, directory: Path) -> Turns:
    """Return the seconds per step of each way's turns; the first round warms up."""
    ways = {name: logger for name, logger in LOGGERS.items() if _there(name)}
    seconds: Turns = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name in list(ways) if number % 2 else reversed(ways):
            with ways[name](training, directory) as log:
                seconds[name].append(_turn(training, log, device))
    return {name: turns[1:] for name, turns in seconds.items()}


def _turn(training: Training, log: Callable[[], None], device: torch.device) -> float:
    training.step(log)  # the first step of a logger prepares what the next ones need
    _finish(device)
    start = perf_counter()
    for _ in range(STEPS_PER_TURN):
        training.step(log)
    _finish(device)
    return (perf_counter() - start) / STEPS_PER_TURN


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _there(name: str) -> bool:
    try:
        import_module(_NEEDS.get(name, "torch"))
    except ImportError:
        return False
    return True


def table(seconds: Turns, device: torch.device) -> str:
    """Return the turns as Markdown, with the machine's description."""
    own = added(seconds, "mp_agent")
    rows = []
    for name, turns in seconds.items():
        ratios = ratios_to_bare(seconds, name)
        low, high = interval(ratios)
        share = added(seconds, name) / own if own > 0 and name != BARE else None
        rows.append(
            (
                name,
                f"{median(turns) * 1e3:.2f} ms",
                f"**{median(ratios):.3f}**",
                f"{low:.3f} to {high:.3f}",
                "" if share is None else f"{share:.1f}",
            )
        )
    rows += [(name, "not installed", "", "", "") for name in LOGGERS if name not in seconds]
    return f"{describe(device)}\n\n{markdown(HEADER, rows)}"


def ratios_to_bare(seconds: Turns, name: str) -> list[float]:
    """Return what the turns of one way took, compared with the bare ones of their rounds."""
    return [turn / bare for turn, bare in zip(seconds[name], seconds[BARE], strict=True)]


def added(seconds: Turns, name: str) -> float:
    """Return the seconds that one way adds to a step, as the median over the rounds."""
    return median(turn - bare for turn, bare in zip(seconds[name], seconds[BARE], strict=True))


def main() -> None:
    """Measure all ways and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add_arguments(parser)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, help="as many as torch takes by itself by default")
    arguments = parser.parse_args()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        training = chosen_training(arguments)
        seconds = measure(training, arguments.device, arguments.rounds, Path(directory))
    print(f"{training.what}: {table(seconds, arguments.device)}")


if __name__ == "__main__":
    main()
