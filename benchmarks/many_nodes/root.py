"""A real root agent in a separate process, with the rings of its node's ranks."""

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.many_nodes.model import RUN, Model
from mp_agent.records.steps import Phase
from mp_agent.ring import locations
from mp_agent.ring.writer import RingWriter
from mp_agent.settings import Settings
from mp_agent.settings.load import handed_over

_START_SECONDS = 30.0


class RootAgent:
    """Use as a context manager: the agent is started, its ranks are in this process."""

    def __init__(self, model: Model, directory: Path, token: str, push_seconds: float) -> None:
        self._model = model
        self._run_dir = locations.run_directory(directory / "shm", RUN)
        self._settings = Settings(
            port=0,
            bind="127.0.0.1",
            dir=directory / "shm",
            log_dir=directory / "log",
            flight_dir=directory / "flight",
            push_interval_seconds=push_seconds,
            token=token,
        )
        self._stack = ExitStack()
        self.url = ""

    def __enter__(self) -> "RootAgent":
        self._rings = [self._ring(rank) for rank in self._model.ranks(0)]
        self._stack.callback(self._end)
        self._start()
        self.url = _waited_for(self._found_url)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def replace(self) -> None:
        """Kill the agent, and start another one in its place: it serves at the same address."""
        self._process.kill()
        self._process.wait()
        self._start()

    def write(self, sequence: int, *, sampled: bool) -> None:
        """Let this node's ranks write a step."""
        for rank, ring in self._rings:
            ring.stamp(Phase.FORWARD, sequence=sequence + 1)
            ring.write_step(self._model.step(rank, sequence, sampled=sampled))
            if sampled:
                ring.write_layers(self._model.table(rank, sequence))

    def processor_seconds(self) -> float:
        """Return the processor time that the agent has taken since it began."""
        self._check()
        clock_of_process = (~self._process.pid << 3) | 2
        return time.clock_gettime(clock_of_process)

    def memory_mib(self, what: str = "VmRSS") -> float:
        """Return the agent's resident memory, or `VmHWM`, the most that it ever was."""
        self._check()
        status = Path(f"/proc/{self._process.pid}/status").read_text(encoding="ascii")
        line = next(line for line in status.splitlines() if line.startswith(f"{what}:"))
        return int(line.split()[1]) / 1024

    def scrape(self) -> "Scrape":
        """Return what /metrics says."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as answer:
            return Scrape(answer.read())

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mp_agent.node", "--run-dir", str(self._run_dir)],
            env={**os.environ, **handed_over(self._settings)},
        )

    def _ring(self, rank: int) -> tuple[int, RingWriter]:
        identity = self._model.identity(rank)
        ring = RingWriter.create(locations.ring_path(self._run_dir, identity), identity)
        self._stack.callback(ring.close)
        ring.write_schema(self._model.schema(rank))
        return rank, ring

    def _found_url(self) -> str:
        status = locations.read_status(self._run_dir)
        self._check()
        return status.url if status else ""

    def _check(self) -> None:
        code = self._process.poll()
        if code is not None:
            raise RuntimeError(f"the root agent has ended with {code}")

    def _end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Scrape:
    """One answer of /metrics."""

    def __init__(self, body: bytes) -> None:
        self.size_bytes = len(body)
        lines = body.decode().splitlines()
        self.series = sum(not line.startswith("#") for line in lines)
        self.values = {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(body.decode())
            for sample in family.samples
        }

    def value(self, name: str, **labels: str) -> float | None:
        """Return a series of the run, None where there is none."""
        return self.values.get((name, tuple(sorted({"run": RUN, **labels}.items()))))


def _waited_for(found: Callable[[], str]) -> str:
    deadline = time.monotonic() + _START_SECONDS
    while not (value := found()):
        if time.monotonic() > deadline:
            raise TimeoutError("the root agent does not serve")
        time.sleep(0.02)
    return value
