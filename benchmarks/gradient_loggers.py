"""What a training step costs with mp_agent, and with other ways to log its gradients.

The transformer of `step_overhead` is trained in one process; in each round every way has a turn of
a few steps, forth and back, so that all see the same machine. A ratio is the median over rounds of
a turn to the bare one of its round, with the 90 % interval of the bootstrapped median. mp_agent and
`get_total_norm` give one norm per step (mp_agent all its columns, and layers when due), the others
a value per parameter. Lightning and wandb take part where they are installed:
`pip install --group benchmarks`.

    python -m benchmarks.gradient_loggers [--device cuda] [--model NAME] [--precision NAME]
        [--rounds N] [--threads N]
"""

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from math import inf, isnan, nan
from pathlib import Path
from random import Random
from statistics import median
from time import monotonic, perf_counter

import torch
from torch import nn
from torch.nn.utils import get_total_norm

from benchmarks.machine import describe, markdown
from benchmarks.step_overhead import BOOTSTRAPS, PAIRS_AT_LEAST, interval, make_probe
from benchmarks.targets import Target, not_measured, verdict
from benchmarks.training import Training, add_arguments, chosen_training

STEPS_PER_TURN = 3
HEADER = ("a training step with", "step", "ratio to bare", "90 % interval", "added, of mp_agent's")


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


LOGGERS: dict[str, Logger] = {
    "nothing": _bare,
    "mp_agent": _mp_agent,
    "get_total_norm": _total_norm,
    "`grad.norm().item()` of each parameter": _items,
    "Lightning's `grad_norm`": _lightning,
    "`wandb.watch(log_freq=1)`, offline": _wandb,
}
_NEEDS = {"Lightning's `grad_norm`": "lightning", "`wandb.watch(log_freq=1)`, offline": "wandb"}


PER_PARAMETER = list(LOGGERS)[3:]
TIMES_AT_LEAST = 10
LIMIT = f"at least {TIMES_AT_LEAST} times"


@dataclass(frozen=True, slots=True)
class Turns:
    """Seconds per step of each way's turns, and why others have none."""

    seconds: dict[str, list[float]]
    left_out: dict[str, str]


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    return [each.grad for each in model.parameters() if each.grad is not None]


def measure(
    training: Training,
    device: torch.device,
    rounds: int,
    directory: Path,
    limit_seconds: float = inf,
) -> Turns:
    """Time each way's turns; the first round warms up.

    A logger that fails is left out. After `limit_seconds` no round begins but the first ones.
    """
    ways = {name: logger for name, logger in LOGGERS.items() if _there(name)}
    left_out = {name: "not installed" for name in LOGGERS if name not in ways}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    until = monotonic() + limit_seconds
    for number in range(rounds + 1):
        if number >= PAIRS_AT_LEAST and monotonic() > until:
            break
        for name in list(ways) if number % 2 else list(reversed(ways)):
            failures: list[str] = []
            try:
                with ways[name](training, directory) as log:
                    seconds[name].append(_turn(training, partial(_noted, log, failures), device))
            except Exception as error:
                failures.append(_reason(error))
            if failures:
                left_out[name] = failures[0]
                del ways[name]
    return Turns({name: seconds[name][1:] for name in ways}, left_out)


def _noted(log: Callable[[], None], failures: list[str]) -> None:
    """Call a logger; a step in which it fails goes on, for the scaler to be ready for the next."""
    try:
        log()
    except Exception as error:
        failures.append(_reason(error))


def _reason(error: Exception) -> str:
    return f"failed: {type(error).__name__}: {' '.join(str(error).split())[:120]}"


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


def targets(turns: Turns, what: str) -> list[Target]:
    """Return whether mp_agent adds as much less than each logger of parameters as is aimed at."""
    return [_target(turns, name, f"{name}, of mp_agent's: {what}") for name in PER_PARAMETER]


def _target(turns: Turns, name: str, what: str) -> Target:
    missing = [each for each in ("nothing", "mp_agent", name) if each not in turns.seconds]
    if missing:
        return not_measured(what, LIMIT, turns.left_out[missing[0]])
    bare, own, other = (turns.seconds[each] for each in ("nothing", "mp_agent", name))
    rounds = list(zip(bare, own, other, strict=True))
    chance = Random(0)
    drawn = [chance.choices(rounds, k=len(rounds)) for _ in range(BOOTSTRAPS)]
    ratios = sorted(map(_times_as_much, drawn), key=lambda ratio: (isnan(ratio), ratio))
    low, high = ratios[BOOTSTRAPS // 20], ratios[-BOOTSTRAPS // 20]
    result = verdict(lambda ratio: ratio >= TIMES_AT_LEAST, low, high)
    text = f"{low:.1f} to {high:.1f}"
    return Target(what, LIMIT, f"{_times_as_much(rounds):.1f} times", text, result)


def _times_as_much(rounds: list[tuple[float, float, float]]) -> float:
    """Return what a logger adds, of what mp_agent does; infinite where that adds nothing."""
    own = median(own - bare for bare, own, _ in rounds)
    other = median(other - bare for bare, _, other in rounds)
    return max(other, 0.0) / own if own > 0.0 else inf if other > 0.0 else nan


def table(turns_of: Turns, device: torch.device) -> str:
    """Return the turns as Markdown, with the machine's description."""
    seconds = turns_of.seconds
    bare = seconds["nothing"]
    own = _added(seconds["mp_agent"], bare)
    rows = []
    for name, turns in seconds.items():
        ratios = [turn / base for turn, base in zip(turns, bare, strict=True)]
        low, high = interval(ratios)
        share = _added(turns, bare) / own if own > 0 and name != "nothing" else None
        rows.append(
            (
                name,
                f"{median(turns) * 1e3:.2f} ms",
                f"**{median(ratios):.3f}**",
                f"{low:.3f} to {high:.3f}",
                "" if share is None else f"{share:.1f}",
            )
        )
    rows += [(name, reason, "", "", "") for name, reason in turns_of.left_out.items()]
    return f"{describe(device)}\n\n{markdown(HEADER, rows)}"


def _added(turns: list[float], bare: list[float]) -> float:
    return median(turn - base for turn, base in zip(turns, bare, strict=True))


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
        turns = measure(training, arguments.device, arguments.rounds, Path(directory))
    print(f"{training.what}: {table(turns, arguments.device)}")


if __name__ == "__main__":
    main()
