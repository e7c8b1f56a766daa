"""Many nodes push to one real root agent, in real time, over loopback."""

import json
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from math import nan
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.many_nodes.fleet import Plan
from benchmarks.many_nodes.model import Model
from benchmarks.many_nodes.root import RootAgent, Scrape

_SCRAPES = 3
_LEAD_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How fast the simulated run goes, and how long it is watched."""

    step_seconds: float = 1.0
    push_interval_seconds: float = 5.0
    warm_up_steps: int = 10
    steady_steps: int = 20
    """Measured without layer tables."""
    table_steps: int = 16
    """Measured with one table, on the first of them."""
    fleets: int = 2
    """Processes that play the nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveResult:
    """What the root agent took, and what it said in the end."""

    model: Model
    load: Load
    requests_per_second: float
    bytes_per_second: float
    """Bodies that came in, without layer tables."""
    table_bytes: float
    """Bodies that a layer table adds, of all nodes."""
    processor_share: float
    """Of one core: receiving, merging, judging; without layer tables and scrapes."""
    table_processor_seconds: float
    """What a layer table of all nodes adds."""
    memory_mib: float
    """After the table."""
    memory_peak_mib: float
    failures: int
    reasons: dict[str, int]
    """Requests that failed, and why."""
    latency_p50_seconds: float
    latency_p99_seconds: float
    fleet_share: float
    """Of one core: what all the simulated nodes took."""
    late_seconds: float
    """By how much the simulated nodes fell behind their clock at most."""
    dropped: int
    scrape_processor_seconds: float
    final: Scrape
    step: int
    """The last step that the root had closed in `final`."""
    sampled: int

    @property
    def share_with_tables(self) -> float:
        """Share of a core with a layer table every 100 steps."""
        return self.processor_share + self.table_processor_seconds / self._table_seconds

    @property
    def bytes_with_tables(self) -> float:
        """Bytes per second with a layer table every 100 steps."""
        return self.bytes_per_second + self.table_bytes / self._table_seconds

    @property
    def _table_seconds(self) -> float:
        return 100 * self.load.step_seconds


def measure(model: Model, load: Load) -> LiveResult:
    """Run the nodes against a root agent and return what it cost."""
    steady, table = load.warm_up_steps, load.warm_up_steps + load.steady_steps
    last = table + load.table_steps
    sampled = table + 1
    token = secrets.token_hex(16)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=_memory())))
        root = stack.enter_context(RootAgent(model, directory, token, load.push_interval_seconds))
        plans = [
            Plan(
                model=model,
                numbers=tuple(range(1 + part, model.nodes, load.fleets)),
                url=root.url,
                token=token,
                push_interval_seconds=load.push_interval_seconds,
                step_seconds=load.step_seconds,
                steps=last + 1,
                sampled=(sampled,),
                marks=(steady, table),
            )
            for part in range(load.fleets)
        ]
        fleets = stack.enter_context(_fleets([plan for plan in plans if plan.numbers]))
        started = fleets.start()
        marks: dict[int, float] = {}
        memory = [root.memory_mib()]
        for sequence in range(1, last + 1):
            time.sleep(max(started + sequence * load.step_seconds - time.time(), 0.0))
            root.write(sequence, sampled=sequence == sampled)
            memory.append(root.memory_mib())
            if sequence in (steady, table, last):
                marks[sequence] = root.processor_seconds()
        accounts = fleets.accounts()
        memory_mib, peak_mib = root.memory_mib(), root.memory_mib("VmHWM")
        idle, scrapes, scraping = _scrape(root)
        final = scrapes[-1]
    stretches = [_joined(parts) for parts in zip(*(a["stretches"] for a in accounts), strict=True)]
    steady_seconds = load.steady_steps * load.step_seconds
    table_seconds = load.table_steps * load.step_seconds
    share = (marks[table] - marks[steady]) / steady_seconds
    rate = stretches[1]["body_bytes"] / steady_seconds
    reasons: dict[str, int] = {}
    for stretch in stretches:
        for reason, count in stretch["reasons"].items():
            reasons[reason] = reasons.get(reason, 0) + count
    step = final.value("mp_agent_step")
    latencies = sorted(second for s in stretches for second in s["latencies_seconds"]) or [nan]
    return LiveResult(
        model=model,
        load=load,
        requests_per_second=stretches[1]["requests"] / steady_seconds,
        bytes_per_second=rate,
        table_bytes=max(stretches[2]["body_bytes"] - rate * table_seconds, 0.0),
        processor_share=share,
        table_processor_seconds=marks[last] - marks[table] - share * table_seconds,
        memory_mib=memory_mib,
        memory_peak_mib=peak_mib,
        failures=sum(stretch["failures"] for stretch in stretches),
        reasons=reasons,
        latency_p50_seconds=median(latencies),
        latency_p99_seconds=latencies[int(0.99 * (len(latencies) - 1))],
        fleet_share=sum(a["processor_seconds"] for a in accounts) / (last * load.step_seconds),
        late_seconds=max((a["late_seconds"] for a in accounts), default=0.0),
        dropped=sum(account["dropped"] for account in accounts),
        scrape_processor_seconds=scraping,
        final=final,
        step=int(step or 0),
        sampled=sampled,
    )


def _scrape(root: RootAgent) -> tuple[float, Sequence[Scrape], float]:
    """Return the processor time per second at rest, the scrapes, and what one took beside it."""
    before, begun = root.processor_seconds(), time.monotonic()
    time.sleep(1.0)
    idle = (root.processor_seconds() - before) / (time.monotonic() - begun)
    before, begun = root.processor_seconds(), time.monotonic()
    scrapes = [root.scrape() for _ in range(_SCRAPES)]
    used, seconds = root.processor_seconds() - before, time.monotonic() - begun
    return idle, scrapes, max(used - idle * seconds, 0.0) / _SCRAPES


class _Fleets:
    def __init__(self, processes: Sequence["subprocess.Popen[str]"]) -> None:
        self._processes = processes

    def start(self) -> float:
        """Let all begin at the same moment, which is returned."""
        for process in self._processes:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise RuntimeError("a fleet has failed")
        started = time.time() + _LEAD_SECONDS
        for process in self._processes:
            self._tell(process, f"{started}")
        return started

    def accounts(self) -> list[dict[str, Any]]:
        """Wait for the end, and return what each says."""
        return [json.loads(process.communicate()[0]) for process in self._processes]

    def _tell(self, process: "subprocess.Popen[str]", line: str) -> None:
        assert process.stdin is not None
        process.stdin.write(line + "\n")
        process.stdin.flush()

    @classmethod
    def of(cls, processes: Sequence["subprocess.Popen[str]"], plans: Sequence[Plan]) -> "_Fleets":
        fleets = cls(processes)
        for process, plan in zip(processes, plans, strict=True):
            fleets._tell(process, json.dumps(asdict(plan)))
        return fleets


@contextmanager
def _fleets(plans: Sequence[Plan]) -> Iterator[_Fleets]:
    with ExitStack() as stack:
        processes = []
        for _ in plans:
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.many_nodes.fleet"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        yield _Fleets.of(processes, plans)


def _joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    reasons: dict[str, int] = {}
    for part in parts:
        for reason, count in part["reasons"].items():
            reasons[reason] = reasons.get(reason, 0) + count
    return {
        "requests": sum(part["requests"] for part in parts),
        "body_bytes": sum(part["body_bytes"] for part in parts),
        "failures": sum(part["failures"] for part in parts),
        "reasons": reasons,
        "latencies_seconds": [s for part in parts for s in part["latencies_seconds"]],
    }


def _memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
