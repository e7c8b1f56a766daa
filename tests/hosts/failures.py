"""What the tests of failures over several hosts share: their job, its settings, and bounds."""

import re
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.host import Host
from tests.hosts.network import Job, Network

JOB = Path(__file__).parent / "lasting_job.py"
RUN = "llama"
RANKS_PER_HOST = 2
PUSH_SECONDS = 0.5
DEADLINE_SECONDS = 2.0
SETTINGS = {
    "push_interval_seconds": str(PUSH_SECONDS),
    "merge_deadline_seconds": str(DEADLINE_SECONDS),
}
STEP_DEADLINE_SECONDS = DEADLINE_SECONDS + 2 * PUSH_SECONDS
"""How long the root waits for the rows of other nodes."""
BOUND_SECONDS = 10 * STEP_DEADLINE_SECONDS
"""Within so many deadlines /metrics says what happened, on a machine that is busy, too."""
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""With a shared store torchrun sends restarted ranks to addresses of the attempt before."""


class Failing:
    """A job that lasts until `finish`, and what its hosts' /metrics say meanwhile."""

    def __init__(self, hosts: Network, job: Job, gate: Path) -> None:
        self.hosts = hosts
        self.job = job
        self._gate = gate

    def metrics(self, host: int = 0) -> Mapping[str, float]:
        return self.hosts[host].metrics(RUN)

    def begin(self) -> None:
        """Wait for some steps of all ranks: how long a job takes to start says nothing."""
        self.job.wait_for(" step 3\n", times=RANKS_PER_HOST * len(self.job.hosts))

    def until(
        self, what: str, host: int = 0, *, seconds: float = BOUND_SECONDS, **expected: float
    ) -> Mapping[str, float]:
        """Return the metrics of a host once they are as expected, which must be in time.

        Names are those of metrics; "missing" is the number of ranks that are said to be missing.
        """
        return self._until(what, host, 0, expected, seconds)

    def until_whole(self, what: str, host: int = 0) -> Mapping[str, float]:
        """Return the metrics of the root once a step from now on covers all ranks."""
        whole = {"coverage_ratio": 1.0, "missing": 0.0}
        return self._until(what, host, self.step(0) + 1, whole, BOUND_SECONDS)

    def _until(
        self, what: str, host: int, step: int, expected: Mapping[str, float], seconds: float
    ) -> Mapping[str, float]:
        last: dict[str, float] = {}

        def as_expected() -> Mapping[str, float] | None:
            try:
                found = self.metrics(host)
            except OSError:
                return None
            last.clear()
            last.update(found, missing=len(missing_ranks(found)))
            same = all(last.get(name) == pytest.approx(value) for name, value in expected.items())
            return found if same and found.get("step", 0) >= step else None

        try:
            found = self.job.until(as_expected, what, seconds=seconds)
        except AssertionError as error:
            seen = {name: last.get(name) for name in ("step", *expected)}
            raise AssertionError(f"{error}\nlast seen: {seen}, wanted: {expected}") from None
        assert found is not None
        return found

    def step(self, rank: int) -> int:
        """Return the last step that a rank has printed; 0 before the first."""
        found = [
            int(number)
            for index in range(len(self.job.hosts))
            for number in re.findall(rf"^rank {rank} step (\d+)$", self.job.log(index), re.M)
        ]
        return found[-1] if found else 0

    def goes_on(self, *ranks: int, steps: int = 10) -> None:
        """Wait until each of these ranks has made some more steps."""
        aims = {rank: self.step(rank) + steps for rank in ranks}
        self.job.until(
            lambda: all(self.step(rank) >= aim for rank, aim in aims.items()),
            f"steps of ranks {ranks}",
        )

    def stands_still(self, *, seconds: float = 2.0) -> None:
        """Wait until no rank has made a step for so long: twenty times a step's time."""
        last = [0.0, -1]

        def stands() -> bool:
            made = sum(self.job.log(index).count(" step ") for index in range(len(self.job.hosts)))
            if made != last[1]:
                last[:] = [time.monotonic(), made]
            return time.monotonic() - last[0] >= seconds

        self.job.until(stands, "the ranks to stand still")

    def finish(self) -> int:
        """Let the job come to its end, which must be a good one; return its last step."""
        self._gate.touch()
        assert set(self.job.wait()) == {0}, self.job.logs()
        (last,) = {
            int(number)
            for index in range(len(self.job.hosts))
            for number in re.findall(r"^rank \d+ done (\d+)$", self.job.log(index), re.M)
        }
        return last


def start(
    network: Network, directory: Path, *arguments: str, on: Sequence[Host] = (), **options: Any
) -> Failing:
    """Start the job on some hosts, all by default; options: see `Network.start`."""
    gate = directory / "gate"
    words = ("--gate", str(gate), *arguments)
    job = network.start(JOB, *words, run=RUN, hosts=on, **{**SETTINGS, **options})
    return Failing(network, job, gate)


def missing_ranks(metrics: Mapping[str, float]) -> set[int]:
    name = "missing_rank_info{"
    return {int(key[len(name) : -1]) for key in metrics if key.startswith(name)}


def rank_pid(host: Host, local_rank: int) -> int:
    """Return the pid, on its host, of a rank: torchrun starts them in order."""
    pids = host.pids(JOB.name, "--gate")
    ranks = [pid for pid, outside in pids.items() if _is_rank(outside)]
    return sorted(ranks)[local_rank]


def _is_rank(outside: int) -> bool:
    return b"torch.distributed.run" not in Path(f"/proc/{outside}/cmdline").read_bytes()


def kill_agent(host: Host) -> int:
    """Kill the node agent of a host and return the pid that it had."""
    pid = host.wait_for_agent(RUN).pid
    host.signal(pid, signal.SIGKILL)
    return pid


def is_recent(unix_seconds: float) -> bool:
    """Whether a time is the present one by this machine's clock, give or take a minute."""
    return abs(time.time() - unix_seconds) < 60.0
