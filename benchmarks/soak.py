"""Whether a resident node agent grows over a day of training, as a Markdown table.

Run: python -m benchmarks.soak [--hours 24] [--step-seconds 2] [--interval-seconds 0.5]

A real agent watches a directory in which one job after another trains, writes its rings and ends:
normally, or without a word. Jobs differ in their number of ranks and layers; some continue a run,
some are a new one. Every other one has a loss of NaN for some steps, which is critical: the agent
writes a flight record and explains it. Spikes of the loss and lost records are planted too. Steps
come as fast as the agent reads them, with the times of a training of `--step-seconds` a step.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from benchmarks.many_nodes.model import Model
from mp_agent.records.columns import step_columns
from mp_agent.records.steps import EndReason, Phase
from mp_agent.ring import locations
from mp_agent.ring.writer import RingWriter
from mp_agent.settings import Settings
from mp_agent.settings.load import handed_over

_JOB_HOURS = 1.0
_STEPS_AT_ONCE = 100
_SAMPLED_EVERY = 100
_LOOK_SECONDS = 0.2
_QUIET_LOOKS = 5
_RARE = 1e-4
"""Share of the steps of a rank that are lost, and of those with a spike of the loss."""
_WAIT_SECONDS = 300.0
_LOSS_AT, _NONFINITE_AT = map(step_columns(guarded=False).index, ("loss", "loss_nonfinite"))
_NAN_STEPS = 5
_RANKS_AND_LAYERS = ((8, 300), (4, 300), (8, 1000), (2, 50))
_GROWTH_MAX = 0.1
"""Of the middle third of the jobs: what the last third may take more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """What an agent takes, right after a job has ended."""

    hours: float
    steps: int
    ranks: int
    memory_mib: float
    descriptors: int
    threads: int
    files: int
    file_mib: float
    flight_files: int
    """Of flight records, which each run keeps, up to a number of its own."""
    series: int
    processor_seconds: float


class Soak:
    """The agent, its directories, and the jobs that train one after another."""

    def __init__(self, directory: Path, step_seconds: float, interval_seconds: float) -> None:
        self._directory = directory
        self._step_seconds, self._interval_seconds = step_seconds, interval_seconds
        self._random = random.Random(17)
        self._clock_ns = time.time_ns()
        self._steps = self._jobs = 0
        self._settings = Settings(
            port=0,
            bind="127.0.0.1",
            dir=directory / "shm",
            log_dir=directory / "log",
            flight_dir=directory / "flight",
            node_agent="external",
            linger_seconds=0.0,
        )
        self._url = ""

    @contextmanager
    def agent(self) -> Iterator[None]:
        """Run the agent for as long as a `with` lasts."""
        (self._directory / "shm").mkdir()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mp_agent", "node"],
            env={**os.environ, **handed_over(self._settings)},
            stderr=(self._directory / "stderr").open("wb"),
        )
        try:
            yield
        finally:
            self._process.terminate()
            self._process.wait(30)

    def train(self, hours: float) -> Use:
        """Train one job, let it end, and return what the agent takes then."""
        ranks, layers = _RANKS_AND_LAYERS[self._jobs % len(_RANKS_AND_LAYERS)]
        model = Model(nodes=1, placement="fsdp", layers=layers, ranks_per_node=ranks)
        run = f"soak-{self._jobs // 3}"
        run_dir = locations.run_directory(self._directory / "shm", run)
        launched_ns = time.time_ns()
        identities = [
            replace(
                model.identity(rank),
                run=run,
                attempt=self._jobs % 3,
                launch=f"job-{self._jobs}",
                pid=os.getpid(),
                created_unix_ns=launched_ns,
            )
            for rank in range(ranks)
        ]
        rings = [RingWriter.create(locations.ring_path(run_dir, one), one) for one in identities]
        for rank, ring in enumerate(rings):
            ring.write_schema(model.schema(rank))
        last = int(hours * 3600 / self._step_seconds)
        for begin in range(1, last + 1, _STEPS_AT_ONCE):
            for sequence in range(begin, min(begin + _STEPS_AT_ONCE, last + 1)):
                self._clock_ns += int(self._step_seconds * 1e9)
                nan = self._jobs % 2 == 1 and 0 <= sequence - last // 2 < _NAN_STEPS
                for rank, ring in enumerate(rings):
                    self._write(model, rank, ring, sequence, nan and rank == 1)
            time.sleep(self._interval_seconds)
        scrape = self._when_read(run_dir, run, last)
        silent = self._jobs % 4 == 3
        for ring in rings:
            if not silent:
                ring.end(EndReason.COMPLETED)
            ring.close()
        self._let_analyses_end()
        self._jobs, self._steps = self._jobs + 1, self._steps + last
        return self._use(scrape, ranks)

    def _write(self, model: Model, rank: int, ring: RingWriter, sequence: int, nan: bool) -> None:
        sampled = sequence % _SAMPLED_EVERY == 1
        ring.stamp(Phase.FORWARD, sequence=sequence)
        kind = self._random.random()
        if kind < _RARE:
            ring.drop_step(sequence)
            return
        step = model.step(rank, sequence, sampled=sampled)
        step.values[_LOSS_AT] *= 100.0 if kind < 2 * _RARE else 1.0
        if nan:
            step.values[[_LOSS_AT, _NONFINITE_AT]] = (float("nan"), 1.0)
        ring.write_step(replace(step, time_unix_ns=self._clock_ns))
        if sampled:
            ring.write_layers(model.table(rank, sequence))

    def _when_read(self, run_dir: Path, run: str, last: int) -> str:
        """Return what /metrics says once the agent has read the last step."""
        name, seen, deadline = f'mp_agent_step{{run="{run}"}} ', "", 0.0
        while True:
            if self._process.poll() is not None:
                raise RuntimeError("the agent has ended")
            status = locations.read_status(run_dir)
            text = _scraped(status.url) if status else ""
            step = next((line for line in text.splitlines() if line.startswith(name)), "")
            if step and float(step.removeprefix(name)) >= last - 1:
                return text
            if step != seen or not deadline:
                seen, deadline = step, time.monotonic() + _WAIT_SECONDS
            if time.monotonic() > deadline:
                log = (self._directory / "stderr").read_text("utf-8")[-2000:]
                raise TimeoutError(
                    f"{run}: the agent stays at {step or 'nothing'}, not {last}, with "
                    f"{status and status.url}, {len(text)} characters; its log ends with\n{log}"
                )
            time.sleep(0.2)

    def _let_analyses_end(self) -> None:
        """Wait until no post-mortem is under way: jobs of seconds would wait for it in a row."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        quiet = 0
        while quiet < _QUIET_LOOKS:
            time.sleep(_LOOK_SECONDS)
            quiet = 0 if children.read_text("ascii").strip() else quiet + 1

    def _use(self, scrape: str, ranks: int) -> Use:
        process = Path(f"/proc/{self._process.pid}")
        status = dict(
            line.split(":", 1) for line in (process / "status").read_text("ascii").splitlines()
        )
        kept = self._settings.flight_dir
        files = [path for path in self._directory.rglob("*") if path.is_file()]
        records = [path for path in files if path.is_relative_to(kept)]
        files = [path for path in files if path not in records and path.name != "stderr"]
        clock_of_process = (~self._process.pid << 3) | 2
        return Use(
            hours=self._steps * self._step_seconds / 3600,
            steps=self._steps,
            ranks=ranks,
            memory_mib=int(status["VmRSS"].split()[0]) / 1024,
            descriptors=len(list((process / "fd").iterdir())),
            threads=int(status["Threads"]),
            files=len(files),
            file_mib=sum(path.stat().st_size for path in files) / 2**20,
            flight_files=len(records),
            series=sum(line[:1] not in ("#", "") for line in scrape.splitlines()),
            processor_seconds=time.clock_gettime(clock_of_process),
        )


def _scraped(url: str) -> str:
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
            return str(answer.read().decode())
    except (urllib.error.URLError, ConnectionError):
        return ""


_FIELDS = ("memory_mib", "descriptors", "threads", "files", "file_mib", "series")


def growth(uses: Sequence[Use]) -> dict[str, float]:
    """Return by what share each figure is larger in the last third than in the middle third."""
    third = len(uses) // 3
    middle, last = uses[third : 2 * third], uses[2 * third :]
    found = {}
    for name in _FIELDS:
        before = median(getattr(use, name) for use in middle)
        found[name] = median(getattr(use, name) for use in last) / before - 1 if before else 0.0
    return found


def main() -> int:
    """Print the table; return 1 if something grows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--step-seconds", type=float, default=2.0)
    parser.add_argument("--interval-seconds", type=float, default=0.5)
    options = parser.parse_args()
    uses = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        soak = Soak(Path(place), options.step_seconds, options.interval_seconds)
        with soak.agent():
            for _ in range(round(options.hours / _JOB_HOURS)):
                uses.append(soak.train(_JOB_HOURS))
                print(f"{uses[-1]}", file=sys.stderr, flush=True)
    from torch import device

    from benchmarks.machine import describe, markdown

    print(f"{describe(device('cpu'))}\n")
    header = (
        "hours",
        "steps",
        "ranks",
        *(name.replace("_", " ") for name in (*_FIELDS, "flight_files")),
    )
    rows = [
        tuple(
            f"{getattr(use, name):.0f}"
            for name in ("hours", "steps", "ranks", *_FIELDS, "flight_files")
        )
        for use in uses
    ]
    print(markdown(header, rows))
    grown = growth(uses)
    print("\n" + ", ".join(f"{name}: {share:+.1%}" for name, share in grown.items()))
    return int(max(grown.values()) > _GROWTH_MAX)


if __name__ == "__main__":
    sys.exit(main())
