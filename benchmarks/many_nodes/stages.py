"""Processor time of each thing that the root does, one after the other in a single process."""

import gc
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from benchmarks.many_nodes.http_cost import seconds_per_request
from benchmarks.many_nodes.model import Model
from benchmarks.many_nodes.node import SimulatedNode
from benchmarks.many_nodes.simulated_root import SimulatedRoot
from mp_agent.exporters.prometheus import render
from mp_agent.node.agent import POLL_INTERVAL_SECONDS
from mp_agent.node.cluster.root import MergedTable
from mp_agent.node.conditions.tracker import JUDGE_INTERVAL_SECONDS
from mp_agent.node.transport.client import pack, unpack
from mp_agent.records.columns import GRADIENTS
from mp_agent.records.merged import MergedStep
from mp_agent.records.node_report import NodeReport
from mp_agent.records.reports import decode_receipt, encode_receipt
from mp_agent.settings import Settings

T = TypeVar("T")

_PERIOD_STEPS = 5
"""Steps between two reports of a node."""
_STEPS = 3 * _PERIOD_STEPS
_SAMPLED = _STEPS
_RESTS = 5


@dataclass(slots=True, kw_only=True)
class Stages:
    """Seconds of processor time, at the root unless it says otherwise."""

    nodes: int
    report_bytes: float = 0.0
    """Body of a report of five steps, the mean over the nodes."""
    table_report_bytes: float = 0.0
    """Body of one with a layer table besides."""
    make_report: float = 0.0
    """On a node: one report taken, encoded and compressed."""
    serve_request: float = 0.0
    """Of one node: a request with a report, from the socket to the answer."""
    unpack_report: float = 0.0
    """Of one node: decompressed, decoded and checked."""
    receive_report: float = 0.0
    """Of one node: entered into the steps that are open."""
    merge_step: float = 0.0
    """Of all nodes: closed, merged."""
    fold_step: float = 0.0
    """Entered into the run's account, without judging."""
    take_table: float = 0.0
    """Of one node: a report with a table unpacked and entered, less one without."""
    merge_table: float = 0.0
    """Of all nodes: closed, merged and entered into the account."""
    look: float = 0.0
    """A look at everything when nothing is new."""
    judge: float = 0.0
    """The run's conditions, judged once."""

    def processor_share(self, step_seconds: float = 1.0, push_seconds: float = 5.0) -> float:
        """Return the share of a core that it all comes to, with tables every 100 steps."""
        others = self.nodes - 1
        per_step = self.merge_step + self.fold_step + self.judge
        tables = others * max(self.take_table, 0.0) + self.merge_table
        return (
            others * self.serve_request / push_seconds
            + per_step / step_seconds
            + tables / (100 * step_seconds)
            + self.look / POLL_INTERVAL_SECONDS
            + self.judge / JUDGE_INTERVAL_SECONDS
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendering:
    """What a scrape takes, in processor time, and brings."""

    layers: int
    size_bytes: int
    series: int
    reselected_snapshot_seconds: float
    """After a layer table: the layer budget selects the layers again."""
    snapshot_seconds: float
    """Without a layer table before. Taken in the agent's loop."""
    render_seconds: float
    """From the snapshot to the text, in a separate thread."""


def measure_stages(model: Model) -> Stages:
    """Bring three periods of steps and a layer table from all nodes to a root; return the costs.

    The first period comes over HTTP.
    """
    settings = Settings()
    stages = Stages(nodes=model.nodes)
    with tempfile.TemporaryDirectory() as directory:
        root = SimulatedRoot(model, Path(directory), settings, sampled=(_SAMPLED,))
        bodies = [_bodies(model, number, settings, stages) for number in range(1, model.nodes)]
        gc.collect()
        for period in range(_STEPS // _PERIOD_STEPS):
            _take_period(root, [own[period] for own in bodies], period, stages)
        _rest(root, stages)
    others = max(model.nodes - 1, 1)
    stages.make_report /= others
    stages.report_bytes /= others
    stages.table_report_bytes /= others
    _check(model, root)
    return stages


def measure_rendering(layers: int, *, settings: Settings | None = None) -> Rendering:
    """Render the metrics of a run with so many layers, again and again."""
    settings = settings or Settings()
    model = Model(nodes=1, placement="ddp", layers=layers)
    with tempfile.TemporaryDirectory() as directory:
        root = SimulatedRoot(model, Path(directory), settings, sampled=(_SAMPLED,))
        root.node.write(_STEPS)
        for item in root.node.poll(0.0):
            if isinstance(item, MergedStep | MergedTable):
                root.fold(item)
        root.snapshot()
        reselected = min(_timed(root.renew_layers().snapshot)[0] for _ in range(_RESTS))
        again = min(_timed(root.snapshot)[0] for _ in range(_RESTS))
        rendered = [_timed(lambda: render(root.snapshot_taken)) for _ in range(_RESTS)]
    body = rendered[-1][1][0]
    return Rendering(
        layers=layers,
        size_bytes=len(body),
        series=sum(not line.startswith(b"#") for line in body.splitlines()),
        reselected_snapshot_seconds=reselected,
        snapshot_seconds=again,
        render_seconds=min(seconds for seconds, _ in rendered),
    )


def _bodies(model: Model, number: int, settings: Settings, stages: Stages) -> list[bytes]:
    """Return the bodies of a node's reports."""
    node = SimulatedNode(model, number, settings, sampled=(_SAMPLED,))
    bodies = []
    for period, last in enumerate(range(_PERIOD_STEPS, _STEPS + 1, _PERIOD_STEPS)):
        node.write(last)
        node.poll(period * settings.push_interval_seconds)
        seconds, body = _timed(lambda: _body(node))
        bodies.append(body)
        if period == 1:
            stages.make_report += seconds
            stages.report_bytes += len(body)
        elif period == 2:
            stages.table_report_bytes += len(body)
    return bodies


def _body(node: SimulatedNode) -> bytes:
    report = node.next_report()
    assert report is not None
    return pack(report)


def _take_period(root: SimulatedRoot, bodies: list[bytes], period: int, stages: Stages) -> None:
    now_seconds = 5.0 * period
    root.node.write(_PERIOD_STEPS * (period + 1))
    for item in root.node.poll(now_seconds):
        if isinstance(item, MergedStep | MergedTable):
            root.fold(item)
    unpacking, receiving = 0.0, 0.0
    if period == 0:
        stages.serve_request = seconds_per_request(root.node, bodies)
    for body in bodies if period else ():
        seconds, report = _timed(lambda body=body: unpack(body))  # type: ignore[misc]
        unpacking += seconds
        seconds, _ = _timed(lambda report=report: _receive(root, report))  # type: ignore[misc]
        receiving += seconds
    seconds, items = _timed(lambda: root.node.poll(now_seconds))
    steps = [item for item in items if isinstance(item, MergedStep)]
    tables = [item for item in items if isinstance(item, MergedTable)]
    folding, _ = _timed(lambda: _fold_all(root, steps))
    if period == 1:
        reports = max(len(bodies), 1)
        stages.unpack_report, stages.receive_report = unpacking / reports, receiving / reports
        stages.merge_step, stages.fold_step = seconds / len(steps), folding / len(steps)
    elif period == 2:
        before = stages.unpack_report + stages.receive_report
        stages.take_table = (unpacking + receiving) / max(len(bodies), 1) - before
        closing, merged = _timed(lambda: list(root.node.member.merge(final=True)))
        tables += [item for item in merged if isinstance(item, MergedTable)]
        entering, _ = _timed(lambda: _fold_all(root, tables))
        steps_seconds = stages.merge_step * len(steps)
        stages.merge_table = max(seconds - steps_seconds, 0.0) + closing + entering


def _rest(root: SimulatedRoot, stages: Stages) -> None:
    """Measure what goes on without any input."""
    moments = [100.0 + 2 * number for number in range(_RESTS)]
    looking, _ = _timed(lambda: [root.node.poll(20.0) for _ in moments])
    judging, _ = _timed(lambda: _judge_at_each(root, moments))
    stages.look, stages.judge = looking / _RESTS, judging / _RESTS


def _receive(root: SimulatedRoot, report: NodeReport) -> None:
    decode_receipt(encode_receipt(root.node.receive(report)))


def _fold_all(root: SimulatedRoot, items: Iterable[MergedStep | MergedTable]) -> None:
    for item in items:
        root.fold(item)


def _judge_at_each(root: SimulatedRoot, moments_seconds: Iterable[float]) -> None:
    for moment_seconds in moments_seconds:
        root.judge(moment_seconds)


def _timed(work: Callable[[], T]) -> tuple[float, T]:
    begun = time.process_time()
    result = work()
    return time.process_time() - begun, result


def _check(model: Model, root: SimulatedRoot) -> None:
    """Raise unless what was merged is what the model says."""
    step = root.last_step
    assert step is not None
    norm = step.grad_norm
    if step.coverage != 1.0 or norm is None or norm != model.norm(step.sequence):
        raise AssertionError(f"step {step.sequence}: {norm}, not {model.norm(step.sequence)}")
    layers = [root.account.layers[GRADIENTS.name][name] for name in model.layer_names]
    found = [layer.values["sum_squares"] ** 0.5 for layer in layers]
    truth = model.layer_norms(_SAMPLED).tolist()
    exact = all(abs(a - b) <= 1e-12 * b for a, b in zip(found, truth, strict=True))
    if not exact or not all(layer.judged for layer in layers):
        raise AssertionError(f"layers of step {_SAMPLED} are not those of the model")
