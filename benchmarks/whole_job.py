"""What a whole job pays: two ranks, default settings, the node agent that `init()` starts, scrapes.

A transformer of 5 M parameters is trained with DDP on gloo, on few tokens, so that the probe's work
is a large part of a step. The job takes turns of a few steps with the probe's hooks and without
them, in ABBA order, so that both see the same machine; the node agent runs all the time. The first
step of a turn is not counted. Time is that of the processor, of all threads of a rank: a machine
that others use changes it little. A ratio is that of the totals over all turns, with the 90 %
interval of bootstrapped pairs of turns.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.whole_job [--pairs N]
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple
from urllib.request import urlopen

import torch
import torch.distributed as dist

import mp_agent
from benchmarks.machine import describe
from benchmarks.step_overhead import BOOTSTRAPS
from benchmarks.targets import Target, not_measured, table, verdict
from benchmarks.training import SMALL, Training, make_training
from mp_agent.probe import api, hooks
from mp_agent.probe.probe import Probe
from mp_agent.ring import locations
from mp_agent.settings import Settings

SHAPE = replace(SMALL, batch=2, length=128)
EARLY_STEPS = 120
"""Of the probe: those whose layers are measured every tenth time, and a few more."""
STEPS_PER_TURN = 10
PROCESSOR_AT_MOST = 0.015
AGENT_AT_MOST = 0.01
WALL_AT_MOST = 0.02
_SCRAPE_SECONDS = 15
_SCRAPER = """
import sys, time, urllib.request
while True:
    time.sleep(float(sys.argv[2]))
    urllib.request.urlopen(sys.argv[1], timeout=10).read()
"""
_EXPORTED = (
    "mp_agent_overhead_ratio",
    "mp_agent_measuring_interval",
    "mp_agent_layers_interval",
    "mp_agent_steps_measured_total",
    "mp_agent_steps_total",
)


class Turn(NamedTuple):
    """Seconds per step of one turn, on one rank."""

    processor: float
    wall: float


class Pair(NamedTuple):
    """A turn without the hooks, and one with them next to it, on one rank."""

    without: Turn
    with_hooks: Turn


Clock = Callable[[Turn], float]


class Switch:
    """Removes the hooks of an attached probe, and installs them again, between two steps."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._is_on = True

    def on(self) -> None:
        """Install the hooks, unless they are; the time without them is no part of a step."""
        if self._is_on:
            return
        self._is_on = True
        self._probe.attach()
        self._probe._context.step.begun_seconds = time.perf_counter()

    def off(self) -> None:
        """Leave torch as it was."""
        self._is_on = False
        self._probe._instruments.close()
        if (patches := self._probe._patches) is not None:
            patches.restore()
        self._probe._patches = hooks.Patches()


def attached_probe() -> Probe:
    """Return what `mp_agent.init()` has attached."""
    attachment = api._attachment
    if attachment is None:
        raise SystemExit("mp_agent has not attached: see the log")
    return attachment.probe


def take_turn(training: Training) -> Turn:
    """Train a few steps."""
    training.step(_nothing)
    processor, wall = time.process_time(), time.perf_counter()
    for _ in range(STEPS_PER_TURN):
        training.step(_nothing)
    return Turn(
        (time.process_time() - processor) / STEPS_PER_TURN,
        (time.perf_counter() - wall) / STEPS_PER_TURN,
    )


def take_turns(training: Training, switch: Switch, pairs: int) -> list[Pair]:
    """Train so many pairs of turns; leaves the hooks installed."""
    found: list[Pair] = []
    for pair in range(pairs):
        turns: dict[bool, Turn] = {}
        for hooked in (False, True) if pair % 2 else (True, False):
            (switch.on if hooked else switch.off)()
            turns[hooked] = take_turn(training)
        found.append(Pair(turns[False], turns[True]))
    switch.on()
    return found


class NodeAgentWatch:
    """The processor time of the node agent of this node, as the kernel has it."""

    def __init__(self, base: Path) -> None:
        """Wait until it serves, at most a minute."""
        deadline = time.monotonic() + 60.0
        while True:
            runs = locations.find_runs(base)
            status = locations.read_status(runs[0]) if runs else None
            if status is not None and status.url:
                break
            if time.monotonic() > deadline:
                raise SystemExit("the node agent does not serve")
            time.sleep(0.1)
        self.url = f"{status.url}/metrics"
        self._stat = Path(f"/proc/{status.pid}/stat")
        self._samples: list[tuple[float, float]] = []

    def note(self) -> None:
        """Note the time that it has used so far."""
        fields = self._stat.read_text(encoding="ascii").rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])  # utime and stime
        self._samples.append((time.monotonic(), ticks / os.sysconf("SC_CLK_TCK")))

    def shares(self) -> list[float]:
        """Return the share of a core that it used between each two notes."""
        pairs = zip(self._samples, self._samples[1:], strict=False)
        return [(used - before) / (now - then) for (then, before), (now, used) in pairs]

    def exported(self) -> str:
        """Return the lines that say what measuring has cost and how often it took place."""
        with urlopen(self.url, timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return "\n".join(line for line in lines if line.startswith(_EXPORTED))


@contextmanager
def scraped(url: str) -> Iterator[None]:
    """Have the node agent scraped by its own process, as a Prometheus does."""
    command = [sys.executable, "-S", "-c", _SCRAPER, url, str(_SCRAPE_SECONDS)]
    scraper = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        scraper.kill()
        scraper.wait()


def added(pairs: Sequence[Pair], clock: Clock) -> float:
    """Return by which share the turns with hooks took longer."""
    return (
        sum(clock(pair.with_hooks) for pair in pairs) / sum(clock(pair.without) for pair in pairs)
        - 1.0
    )


def target(what: str, limit: float, pairs: Sequence[Pair], clock: Clock) -> Target:
    """Return whether the turns with hooks took no longer than is aimed at."""
    chance = random.Random(0)
    resampled = sorted(added(chance.choices(pairs, k=len(pairs)), clock) for _ in range(BOOTSTRAPS))
    low, high = resampled[BOOTSTRAPS // 20], resampled[-BOOTSTRAPS // 20]
    return Target(
        what,
        f"at most {limit:.1%}",
        f"{added(pairs, clock):.2%}",
        f"{low:.2%} to {high:.2%}",
        verdict(lambda share: share <= limit, low, high),
    )


def agent_target(shares: Sequence[float]) -> Target:
    """Return whether the node agent used no more of a core than is aimed at."""
    ordered, mean = sorted(shares), sum(shares) / len(shares)
    chance = random.Random(0)
    means = sorted(
        sum(chance.choices(ordered, k=len(ordered))) / len(ordered) for _ in range(BOOTSTRAPS)
    )
    low, high = means[BOOTSTRAPS // 20], means[-BOOTSTRAPS // 20]
    return Target(
        "the node agent's share of a core",
        f"at most {AGENT_AT_MOST:.1%}",
        f"{mean:.2%}",
        f"{low:.2%} to {high:.2%}",
        verdict(lambda share: share <= AGENT_AT_MOST, low, high),
    )


def budget_target(exported: str) -> Target:
    """Return whether the ranks export that they keep to `overhead_budget`, as it is by default."""
    limit = Settings().overhead_budget
    shares = [
        float(line.rpartition(" ")[2])
        for line in exported.splitlines()
        if line.startswith("mp_agent_overhead_ratio")
    ]
    if not shares:
        return not_measured("mp_agent_overhead_ratio of a rank", f"at most {limit:.1%}", "absent")
    low, high = min(shares), max(shares)
    return Target(
        "mp_agent_overhead_ratio of a rank",
        f"at most {limit:.1%}",
        f"{sum(shares) / len(shares):.2%}",
        f"{low:.2%} to {high:.2%} (of the ranks)",
        verdict(lambda share: share <= limit, low, high),
    )


def measured(training: Training, base: Path, pairs: int, settle: int) -> str | None:
    """Return the report of rank 0; None on other ranks, which train along."""
    switch = Switch(attached_probe())
    training.step(_nothing)
    first = dist.get_rank() == 0
    watch = NodeAgentWatch(base) if first else None
    dist.barrier()
    early = take_turns(training, switch, EARLY_STEPS // (STEPS_PER_TURN + 1))
    for _ in range(settle):
        training.step(_nothing)
    if watch is None:
        late = take_turns(training, switch, pairs)
    else:
        late = []
        with scraped(watch.url):
            watch.note()
            for _ in range(max(1, pairs // 10)):
                late += take_turns(training, switch, 10)
                watch.note()
    gathered: list[tuple[list[Pair], list[Pair]]] = [([], [])] * dist.get_world_size()
    dist.all_gather_object(gathered, (early, late))
    if watch is None:
        return None
    early = [pair for of_rank, _ in gathered for pair in of_rank]
    late = [pair for _, of_rank in gathered for pair in of_rank]
    processor, wall = attrgetter("processor"), attrgetter("wall")
    targets = [
        target(f"processor time, steps 1 to {EARLY_STEPS}", PROCESSOR_AT_MOST, early, processor),
        target("processor time, later steps", PROCESSOR_AT_MOST, late, processor),
        target("time, later steps", WALL_AT_MOST, late, wall),
        agent_target(watch.shares()),
        budget_target(exported := watch.exported()),
    ]
    times = [pair.without for pair in late]
    step = f"{1e3 * sum(turn.processor for turn in times) / len(times):.1f} ms of processor time"
    step += f", {1e3 * sum(turn.wall for turn in times) / len(times):.1f} ms"
    return f"A step without: {step}.\n\n{table(targets)}\n\n{exported}"


def _nothing() -> None:
    """Do nothing."""


def main() -> None:
    """Measure, and print a table on rank 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument(
        "--settle", type=int, default=500, help="steps in which `overhead_budget` takes effect"
    )
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as own:
        chosen: list[str] = [own]
        dist.broadcast_object_list(chosen)
        mp_agent.init(dir=Path(chosen[0]), run="whole-job")
        training = make_training(torch.device("cpu"), SHAPE)
        report = measured(training, Path(chosen[0]), arguments.pairs, arguments.settle)
        if report:
            print(f"{describe(torch.device('cpu'))}\n{training.what}\n\n{report}", flush=True)
        dist.barrier()
        mp_agent.shutdown()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
