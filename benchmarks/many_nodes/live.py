"""Many nodes push to one real root agent, in real time, over loopback."""

import json
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from math import isnan, nan
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.many_nodes.fleet import Plan, Stretch
from benchmarks.many_nodes.model import Model
from benchmarks.many_nodes.root import RootAgent, Scrape

_SCRAPES = 3
_REST_SECONDS = 2.0
_WATCH_SECONDS = 0.5
_YARDSTICKS = 5
_YARDSTICK_SIZE = 20_000
_LAYER_ERROR_MAX = 1e-12
"""Layers are added up in float64, in the order of the nodes; steps are exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How fast the simulated run goes, and how long it is watched."""

    step_seconds: float = 1.0
    push_interval_seconds: float = 5.0
    warm_up_steps: int = 8
    steady_steps: int = 20
    """Steps measured without layer tables."""
    table_steps: int = 15
    """Measured with one table, on the first of them."""
    fleets: int = 2
    """Processes that simulate the nodes."""
    start_seconds: float = 0.5
    """Before the first step: so long it takes until all nodes have begun to push."""
    trouble_steps: int = 0
    """After what is measured: in the first third of them the root is killed and another one takes
    its place, in the second every tenth of the simulated nodes is silent."""
    drain_seconds: float = 0.0
    """After the last step: so long the nodes go on, without new rows."""
    stretch: float = 1.0
    """Factor by which the run's clock is slowed down, for machines that cannot hold it."""

    @property
    def slow_step_seconds(self) -> float:
        """A step by the machine's clock."""
        return self.step_seconds * self.stretch

    @property
    def slow_push_seconds(self) -> float:
        """A period of the nodes by the machine's clock."""
        return self.push_interval_seconds * self.stretch


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
    """Of one core: receiving, merging, judging; without layer tables and scrapes. Of a slowed
    clock: computed for the clock as it is, what the agent does without any input taken as it is."""
    slowdown: float
    """How many times as long as at best the machine took for the same work meanwhile: processor
    time includes what other processes on the same core, and other machines on the host, cost."""
    table_processor_seconds: float
    """What a layer table of all nodes adds."""
    memory_mib: float
    """Memory after the table."""
    memory_peak_mib: float
    failures: int
    reasons: dict[str, int]
    """Requests that failed, and why."""
    latency_p50_seconds: float
    latency_p99_seconds: float
    late_seconds: float
    """Most seconds that the simulated nodes fell behind their clock."""
    dropped: int
    scrape_processor_seconds: float
    final: Scrape
    step: int
    """The last step that the root had closed in `final`."""
    sampled: int
    nan_seconds: Sequence[float] = ()
    """From the end of a step with a NaN to the root's counter of them, ascending, within 0.5 s.
    Steps of the time of trouble are not among them."""
    start_seconds: float = nan
    """From when the first agent began until the root knew all nodes; measured where NaN are."""

    @property
    def share_with_tables(self) -> float:
        """Share of a core with a layer table every 100 steps."""
        return self.processor_share + self.table_processor_seconds / self._table_seconds

    @property
    def bytes_with_tables(self) -> float:
        """Bytes per second with a layer table every 100 steps."""
        return self.bytes_per_second + self.table_bytes / self._table_seconds

    def mistakes(self) -> Iterator[str]:
        """Yield what the root said that is not what the model says."""
        final, norm = self.final, self.model.norm(self.step)
        expected = {
            "mp_agent_grad_norm": norm,
            "mp_agent_loss": self.model.loss(self.step),
            "mp_agent_coverage_ratio": 1.0,
            "mp_agent_steps_total": float(self.step),
        }
        if every := self.model.nan_steps:
            expected["mp_agent_grad_nonfinite_steps_total"] = float(self.step // every)
        for name, value in expected.items():
            if final.value(name) != value:
                yield f"{name} is {final.value(name)}, not {value}"
        counts = {
            "mp_agent_nodes_known": float(self.model.nodes),
            "mp_agent_records_dropped_total": 0.0,
            "mp_agent_rows_refused_total": 0.0,
        }
        for name, value in counts.items():
            if final.value(name, node_rank="0") != value:
                yield f"{name} is {final.value(name, node_rank='0')}, not {value}"
        if self.dropped:
            yield f"nodes dropped {self.dropped} rows"
        truth = self.model.layer_norms(self.sampled).tolist()
        for layer, value in zip(self.model.layer_names, truth, strict=True):
            found = final.value("mp_agent_layer_grad_norm", layer=layer)
            if found is None or abs(found - value) > _LAYER_ERROR_MAX * value:
                yield f"the norm of {layer} is {found}, not {value}"
                break

    @property
    def _table_seconds(self) -> float:
        return 100 * self.load.step_seconds


def measure(model: Model, load: Load) -> LiveResult:
    """Run the nodes against a root agent and return what it cost."""
    steady, table = load.warm_up_steps, load.warm_up_steps + load.steady_steps
    last = table + load.table_steps
    third = load.trouble_steps // 3
    # A root that takes the place of another one has layers with the next table.
    sampled = (table + 1, last + 2 * third + 1) if third else (table + 1,)
    token = secrets.token_hex(16)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=_memory())))
        root = stack.enter_context(RootAgent(model, directory, token, load.slow_push_seconds))
        plans = [
            Plan(
                model=model,
                numbers=tuple(range(1 + part, model.nodes, load.fleets)),
                url=root.url,
                token=token,
                push_interval_seconds=load.slow_push_seconds,
                step_seconds=load.slow_step_seconds,
                steps=last + load.trouble_steps,
                sampled=sampled,
                marks=(steady, table, last),
                silent=(last + third, last + 2 * third),
                drain_seconds=load.drain_seconds,
            )
            for part in range(load.fleets)
        ]
        fleets = stack.enter_context(_fleets([plan for plan in plans if plan.numbers]))
        started = fleets.start(load.start_seconds)
        watch = stack.enter_context(_NanWatch(root, model, started, load))
        marks: dict[int, float] = {}
        yardstick: list[float] = []
        for sequence in range(1, last + load.trouble_steps + 1):
            time.sleep(max(started + sequence * load.slow_step_seconds - time.time(), 0.0))
            root.write(sequence, sampled=sequence in sampled)
            if steady <= sequence < table:
                yardstick += [_yardstick_seconds() for _ in range(_YARDSTICKS)]
            if sequence in (steady, table, last):
                marks[sequence] = root.processor_seconds()
            if sequence == last:
                memory_mib, peak_mib = root.memory_mib(), root.memory_mib("VmHWM")
            if third and sequence == last + 1:
                root.replace()
        accounts = fleets.accounts()
        watch.stop()
        idle, scrapes, scraping = _scrape(root)
    final = scrapes[-1]
    parts = [_joined(parts) for parts in zip(*(a["stretches"] for a in accounts), strict=True)]
    _, steady_part, table_part, _ = parts
    steady_seconds = load.steady_steps * load.step_seconds
    share = (marks[table] - marks[steady]) / (steady_seconds * load.stretch)
    table_share = (marks[last] - marks[table]) / (load.table_steps * load.slow_step_seconds)
    rate = steady_part.body_bytes / steady_seconds
    latencies = sorted(second for part in parts for second in part.latencies_seconds) or [nan]
    return LiveResult(
        model=model,
        load=load,
        requests_per_second=steady_part.requests / steady_seconds,
        bytes_per_second=rate,
        table_bytes=max(table_part.body_bytes - rate * load.table_steps * load.step_seconds, 0.0),
        processor_share=idle + (share - idle) * load.stretch,
        slowdown=median(yardstick) / min(yardstick, default=1.0) if yardstick else 1.0,
        table_processor_seconds=(table_share - share) * load.table_steps * load.slow_step_seconds,
        memory_mib=memory_mib,
        memory_peak_mib=peak_mib,
        failures=sum(part.failures for part in parts),
        reasons=_summed(part.reasons for part in parts),
        latency_p50_seconds=median(latencies),
        latency_p99_seconds=latencies[int(0.99 * (len(latencies) - 1))],
        late_seconds=max((a["late_seconds"] for a in accounts), default=0.0),
        dropped=sum(account["dropped"] for account in accounts),
        scrape_processor_seconds=scraping,
        final=final,
        step=int(final.value("mp_agent_step") or 0),
        sampled=sampled[-1],
        nan_seconds=sorted(watch.seconds[: last // model.nan_steps if model.nan_steps else 0]),
        start_seconds=watch.start_seconds,
    )


class _NanWatch:
    """Asks the root twice a second how many nodes it knows, and how many steps had a NaN.

    Only where the model has such steps.
    """

    def __init__(self, root: RootAgent, model: Model, started: float, load: Load) -> None:
        self.seconds: list[float] = []
        self.start_seconds = nan
        self._root, self._model = root, model
        self._started, self._step_seconds = started, load.slow_step_seconds
        self._lead_seconds = load.start_seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> "_NanWatch":
        if self._model.nan_steps:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End; what has not been counted by now is not among the times."""
        self._stop.set()
        if self._model.nan_steps:
            self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(_WATCH_SECONDS):
            try:
                scrape = self._root.scrape()
            except OSError:
                continue  # it is being replaced
            nodes = scrape.value("mp_agent_nodes_known", node_rank="0")
            if isnan(self.start_seconds) and nodes == self._model.nodes:
                self.start_seconds = time.time() - self._started + self._lead_seconds
            known = int(scrape.value("mp_agent_grad_nonfinite_steps_total") or 0)
            for event in range(len(self.seconds) + 1, known + 1):
                ended = self._started + event * self._model.nan_steps * self._step_seconds
                self.seconds.append(time.time() - ended)


def _scrape(root: RootAgent) -> tuple[float, Sequence[Scrape], float]:
    """Return the processor time per second at rest, the scrapes, and the time of one more."""
    before, begun = root.processor_seconds(), time.monotonic()
    time.sleep(_REST_SECONDS)
    idle = (root.processor_seconds() - before) / (time.monotonic() - begun)
    before, begun = root.processor_seconds(), time.monotonic()
    scrapes = [root.scrape() for _ in range(_SCRAPES)]
    used, seconds = root.processor_seconds() - before, time.monotonic() - begun
    return idle, scrapes, max(used - idle * seconds, 0.0) / _SCRAPES


class _Fleets:
    def __init__(self, processes: Sequence["subprocess.Popen[str]"]) -> None:
        self._processes = processes

    def start(self, lead_seconds: float) -> float:
        """Let all begin, and return when the first step does."""
        for process in self._processes:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise RuntimeError("a fleet has failed")
        started = time.time() + lead_seconds
        for process in self._processes:
            self._send(process, f"{started}")
        return started

    def accounts(self) -> list[dict[str, Any]]:
        """Wait for the end, and return what each says."""
        return [json.loads(process.communicate()[0]) for process in self._processes]

    def _send(self, process: "subprocess.Popen[str]", line: str) -> None:
        assert process.stdin is not None
        process.stdin.write(line + "\n")
        process.stdin.flush()

    @classmethod
    def of(cls, processes: Sequence["subprocess.Popen[str]"], plans: Sequence[Plan]) -> "_Fleets":
        fleets = cls(processes)
        for process, plan in zip(processes, plans, strict=True):
            fleets._send(process, json.dumps(asdict(plan)))
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


def _joined(parts: Sequence[dict[str, Any]]) -> Stretch:
    return Stretch(
        requests=sum(part["requests"] for part in parts),
        body_bytes=sum(part["body_bytes"] for part in parts),
        failures=sum(part["failures"] for part in parts),
        reasons=_summed(part["reasons"] for part in parts),
        latencies_seconds=[second for part in parts for second in part["latencies_seconds"]],
    )


def _summed(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for part in counts:
        total.update(part)
    return dict(total)


def _yardstick_seconds() -> float:
    """Return the processor time of a piece of work that is always the same."""
    begun = time.thread_time()
    sum(number * number for number in range(_YARDSTICK_SIZE))
    return time.thread_time() - begun


def _memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
