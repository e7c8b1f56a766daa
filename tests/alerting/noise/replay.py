"""Plays a scenario in simulated time through the real chain, from rings to scraped samples.

The ranks' rings are written as the probe writes them and read by the node agent's own `Run`: merge,
counters, windows and catalog are the real ones. Only the clock and the locks by which a rank is
seen to live are simulated, since everything happens in one process; the node agent's own detectors
are off unless they are asked for, since it is the rules that are put to the test here.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil, inf, nan
from pathlib import Path
from random import Random
from unittest.mock import patch

import msgspec
import numpy as np
import torch

from mp_agent.alerting.rules import render_rules
from mp_agent.alerting.values import values_in_force
from mp_agent.catalog.metric import HistogramValue, Snapshot
from mp_agent.catalog.metrics import METRICS
from mp_agent.catalog.thresholds import resolve
from mp_agent.lint.script import check_script
from mp_agent.node.conditions.tracker import ConditionTracker
from mp_agent.node.run.run import Run
from mp_agent.node.series.snapshot_builder import SnapshotBuilder
from mp_agent.probe.delivery.other_families import OwnShares
from mp_agent.probe.instruments.logprobs import LogprobComparison
from mp_agent.records.baseline import Baseline
from mp_agent.records.columns import (
    ACTIVATIONS,
    ATTENTION,
    DISTRIBUTION,
    FAMILIES,
    FP8,
    GRADIENT_COLUMN_NAMES,
    GRADIENTS,
    LOGITS,
    LOGPROBS,
    OPTIMIZER,
    ROUTERS,
    STEP_COLUMN_NAMES,
    TENSORS,
)
from mp_agent.records.schema import Layer, Schema, Share, family_columns
from mp_agent.records.steps import FloatArray, Phase, StepRecord
from mp_agent.records.tensor_collections import packed
from mp_agent.records.views import ScriptFindings
from mp_agent.ring import locations
from mp_agent.ring.writer import RingWriter
from mp_agent.settings import Settings
from tests.agent.node.builders import make_identity
from tests.alerting.noise.events import (
    Count,
    CutOff,
    End,
    Event,
    Fault,
    Kill,
    Pause,
    Relaunch,
    Scenario,
    ScriptCheck,
    Step,
    Unreachable,
    Vanish,
)

SCRAPE_SECONDS = 15
RULES = render_rules(values_in_force())
_WANTED = set(re.findall(r"mp_agent_\w+", RULES))
"""Series that a rule looks at; the rest is only weight."""
_METRICS = [
    metric
    for metric in METRICS
    if _WANTED & {metric.prometheus_name + suffix for suffix in ("", "_sum", "_count")}
]
_START_UNIX_SECONDS = 1_700_000_000.0
_ELEMENTS = 1000.0
_LINGER_SECONDS = 120.0


class _WithoutConditions(ConditionTracker):
    """Judges nothing: to read all gauges after each step takes a while."""

    def after_step(self, *_: object) -> None:
        """Do nothing."""

    def tick(self, *_: object) -> bool:
        """Return that nothing has changed."""
        return False


_NO_DETECTORS = (
    "mp_agent.node.run.state.ConditionTracker",
    partial(_WithoutConditions, conditions=()),
)
_EVERY_STEP = ("mp_agent.node.conditions.tracker.PROCESSOR_SHARE", 1.0)
"""However long a judgement takes here, so that two recordings of a scenario are the same."""

Series = tuple[str, tuple[tuple[str, str], ...]]
"""Name, and label pairs."""


@dataclass(slots=True)
class Recording:
    """What the scraper has of one run: a sample per scrape and series, None where there is none."""

    scenario: Scenario
    scrapes: int
    samples: dict[Series, list[float | None]] = field(default_factory=dict)
    fault_seconds: float | None = None

    def add(self, tick: int, series: Series, value: float) -> None:
        values = self.samples.setdefault(series, [None] * self.scrapes)
        values[tick] = value


def record(scenario: Scenario, directory: Path, *, detectors: bool = False) -> Recording:
    """Return what Prometheus would have scraped of a scenario.

    detectors: whether the node agent's own judge every step.
    """
    with _simulated_locks() as alive, patch(*(_EVERY_STEP if detectors else _NO_DETECTORS)):
        player = _Player(scenario, directory, alive)
        try:
            for event in scenario.script(Random(scenario.name)):
                if player.over:
                    break
                player.play(event)
            player.pass_time(scenario.minutes * 60)
        finally:
            player.close()
    return player.recording


@contextmanager
def _simulated_locks() -> Iterator[set[str]]:
    """Make a ring's lock held exactly while its path is in the set that is yielded."""
    alive: set[str] = set()

    def is_locked(fd: int) -> bool:
        return os.readlink(f"/proc/self/fd/{fd}") in alive

    with patch("mp_agent.ring.reader.is_locked", is_locked):
        yield alive


def _baseline(scenario: Scenario, directory: Path) -> Path | None:
    if not scenario.good_layers:
        return None
    path = directory / f"{scenario.name}.baseline.json"
    layers = dict.fromkeys(scenario.good_layers, 0.0)
    good = Baseline(runs=("good",), world_sizes=(scenario.ranks,), layers=layers)
    path.write_bytes(msgspec.json.encode(good))
    return path


class _Node:
    """One machine: its ranks, its node agent, and how both are reached."""

    def __init__(self, number: int, scenario: Scenario, directory: Path) -> None:
        self.number = number
        self.run_dir = locations.run_directory(directory / f"node-{number}", scenario.name)
        settings = Settings(
            dir=directory, log_dir=directory / "log", baseline=_baseline(scenario, directory)
        )
        self.run = Run(self.run_dir, settings)
        self.target = (("instance", f"{scenario.name}-{number}:9464"), ("job", "train"))
        self.cut_off = False
        self.gone_at = inf
        """When the node agent is gone."""
        self.listed = False
        """Whether its target is scraped all the same, and fails."""
        self._builder = SnapshotBuilder(resolve({}), settings.max_series, metrics=_METRICS)

    def report_to(self, root: "_Node") -> None:
        """Hand over what is new, as the transport does."""
        while not self.cut_off and (report := self.run.next_report()) is not None:
            self.run.acknowledge(root.run.receive(report))

    def samples(self, seconds: float) -> Iterator[tuple[Series, float]]:
        """Yield what a scrape brings to the rules."""
        if self.run.seen:
            now = _START_UNIX_SECONDS + seconds
            built = self._builder.build([self.run.export(seconds, now)], now)
            yield from (sample for sample in _flat(built) if sample[0][0] in _WANTED)


class _Player:
    def __init__(self, scenario: Scenario, directory: Path, alive: set[str]) -> None:
        self.recording = Recording(scenario, ceil(scenario.minutes * 60 / SCRAPE_SECONDS))
        self._scenario = scenario
        self._alive = alive
        self._directory = directory
        self._nodes = [_Node(number, scenario, directory) for number in range(scenario.nodes)]
        self._ranks: dict[int, _Rank] = {}
        self._attempt = 0
        self._seconds = 0.0
        self._tick = 0
        self._unreachable_until = 0.0
        self._launch()

    @property
    def over(self) -> bool:
        return self._tick >= self.recording.scrapes

    def play(self, event: Event) -> None:
        match event:
            case Step():
                self._step(event)
            case Pause():
                for number, rank in self._ranks.items():
                    rank.ring.stamp(event.of_rank.get(number, event.phase))
                self.pass_time(event.seconds)
                for rank in self._ranks.values():
                    rank.ring.stamp(Phase.FORWARD, sequence=rank.sequence + 1)
            case End(reason):
                for rank in self._ranks.values():
                    rank.ring.end(reason)
                self._bury(tuple(self._ranks))
            case Kill(ranks):
                self._bury(ranks)
            case Relaunch(seconds):
                self._bury(tuple(self._ranks))
                self.pass_time(seconds)
                self._attempt += 1
                self._launch()
            case Count(counts):
                self._ranks[0].ring.count(**counts)
            case ScriptCheck(source):
                script = self._directory / "train.py"
                script.write_text(source)
                report = check_script(str(script))
                self._nodes[0].run.script_findings = ScriptFindings(
                    files=report.files, counts=report.counts()
                )
            case Unreachable(seconds):
                self._unreachable_until = self._seconds + seconds
            case CutOff(node):
                self._nodes[node].cut_off = True
            case Vanish(nodes, listed):
                for node in nodes:
                    self._nodes[node].gone_at = self._seconds
                    self._nodes[node].listed = listed
                    self._nodes[node].cut_off = True
                self._bury(tuple(r for r in self._ranks if self._node_of(r).number in nodes))
            case Fault():
                self.recording.fault_seconds = self._seconds

    def pass_time(self, seconds: float) -> None:
        """Let time pass, and be scraped whenever it is time for it."""
        end = self._seconds + seconds
        while not self.over and self._tick * SCRAPE_SECONDS < end:
            self._seconds = float(self._tick * SCRAPE_SECONDS)
            self._scrape()
            self._tick += 1
        self._seconds = end

    def close(self) -> None:
        self._bury(tuple(self._ranks))
        for node in self._nodes:
            node.run.close()

    def _node_of(self, rank: int) -> _Node:
        return self._nodes[rank * self._scenario.nodes // self._scenario.ranks]

    def _launch(self) -> None:
        local = self._scenario.ranks // self._scenario.nodes
        for number in range(self._scenario.ranks):
            node = self._node_of(number)
            identity = make_identity(
                number,
                run=self._scenario.name,
                world_size=self._scenario.ranks,
                local_rank=number % local,
                local_world_size=local,
                node_rank=node.number,
                attempt=self._attempt,
                created_unix_ns=round((_START_UNIX_SECONDS + self._seconds) * 1e9) + number,
            )
            path = locations.ring_path(node.run_dir, identity)
            rank = _Rank(
                RingWriter.create(path, identity),
                _schema(self._scenario, number),
                self._scenario.layers,
                self._scenario.modules,
                self._scenario.logprobs,
                self._scenario.tensors,
            )
            rank.ring.write_schema(rank.schema)
            rank.ring.stamp(Phase.FORWARD, sequence=1)
            self._ranks[number] = rank
            self._alive.add(str(path))
        for node in self._nodes:
            node.gone_at = inf

    def _bury(self, ranks: tuple[int, ...]) -> None:
        """Let ranks be dead; an agent whose ranks are all dead lingers, and is gone then."""
        for number in ranks:
            if rank := self._ranks.pop(number, None):
                self._alive.discard(str(rank.ring.path))
                rank.ring.close()
        for node in self._nodes:
            if all(self._node_of(number) is not node for number in self._ranks):
                node.gone_at = min(node.gone_at, self._seconds + _LINGER_SECONDS)

    def _step(self, step: Step) -> None:
        """Let the step take its time, then write it: a scrape in between sees it under way."""
        self.pass_time(step.seconds)
        if self.over:
            return
        for number, rank in self._ranks.items():
            rank.write(step, number, _START_UNIX_SECONDS + self._seconds)

    def _scrape(self) -> None:
        reached = self._seconds >= self._unreachable_until
        nodes = [node for node in self._nodes if self._seconds < node.gone_at]
        self._poll(nodes)
        for node in (node for node in self._nodes if node.listed and node not in nodes):
            self.recording.add(self._tick, ("up", node.target), 0.0)
        for node in nodes:
            self.recording.add(self._tick, ("up", node.target), float(reached))
            for (name, labels), value in node.samples(self._seconds) if reached else ():
                self.recording.add(self._tick, (name, (*node.target, *labels)), value)

    def _poll(self, nodes: Sequence[_Node]) -> None:
        """Let the agents read their rings, and the root merge what the others have read."""
        for node in nodes:
            node.run.poll(self._seconds)
        root, *others = nodes or (None,)
        if root is not None and others and root.run.seen:
            for node in others:
                node.report_to(root)
            root.run.poll(self._seconds)


class _Rank:
    def __init__(
        self,
        ring: RingWriter,
        schema: Schema,
        layers: tuple[str, ...],
        modules: tuple[str, ...],
        logprobs: bool,
        tensors: tuple[str, ...],
    ) -> None:
        self.ring = ring
        self.logprobs = logprobs
        self.layers = layers
        self.modules = modules
        self.tensors = tensors
        self.own = OwnShares(schema)
        self.schema = schema
        self.sequence = 0
        self._moment = 0.0
        """Moving average of the squared norm, as Adam would have it."""

    def write(self, step: Step, number: int, time_unix_seconds: float) -> None:
        self.sequence += 1
        ratio = self._squared_ratio(step)
        norm = step.norm_of_rank.get(number, step.norm)
        of_share = _gradients(replace(step, norm=norm), _ELEMENTS * len(self.layers))
        record = StepRecord(
            sequence=self.sequence,
            step=self.sequence if step.step is None else step.step,
            time_unix_ns=round(time_unix_seconds * 1e9),
            values=_step_columns(step, number),
            families={GRADIENTS.name: of_share[None, :]},
        )
        sampled = self.sequence % (10 if self.sequence <= 100 else 100) == 0
        if sampled:
            updates = _updates(step, ratio, _ELEMENTS * len(self.layers))
            spread = _distribution(step, _ELEMENTS * len(self.layers))
            families = {
                **record.families,
                OPTIMIZER.name: updates[None, :],
                DISTRIBUTION.name: spread[None, :],
            }
            record = replace(record, families=families)
        outputs = _outputs(step, self.modules) if sampled and self.modules else {}
        if sampled and self.tensors:
            outputs = {**outputs, **_tensors(step, self.tensors)}
        compared = _compared(step) if self.logprobs else {}
        self.ring.write_step(self.own.step(record, {**outputs, **compared}))
        if sampled:
            rows = np.stack([_layer(step, name, len(self.layers)) for name in self.layers])
            updates = np.stack([_updates(step, ratio, _ELEMENTS)] * len(self.layers))
            spread = np.stack([_distribution(step, _ELEMENTS)] * len(self.layers))
            families = {GRADIENTS.name: rows, OPTIMIZER.name: updates, DISTRIBUTION.name: spread}
            table = self.own.table(self.sequence, families, outputs)
            assert table is not None
            self.ring.write_layers(table)
        self.ring.stamp(Phase.FORWARD, sequence=self.sequence + 1)

    def _squared_ratio(self, step: Step) -> float:
        """Return the squared norm after clipping, divided by Adam's average of it."""
        square = (step.norm if step.clip is None else min(step.norm, step.clip)) ** 2
        if not step.skipped:
            self._moment += (1 - _BETA2) * (square - self._moment)
        moment = self._moment / (1 - _BETA2**self.sequence)
        return square / moment if moment > 0.0 else 0.0


def _schema(scenario: Scenario, rank: int) -> Schema:
    share = Share(group="ddp", replica_index=rank, replica_count=scenario.ranks)
    own: dict[str, tuple[str, ...]] = {}
    if scenario.modules:
        own[ACTIVATIONS.name] = scenario.modules
        own[ATTENTION.name] = ("blocks.1.attn",)
        own[LOGITS.name] = ("output",)
        own[ROUTERS.name] = ("blocks.1.gate",)
        own[FP8.name] = ("blocks.1.mlp",)
    if scenario.tensors:
        own[TENSORS.name] = scenario.tensors
    if scenario.logprobs:
        own[LOGPROBS.name] = ()
    facts = {"strategy": "ddp", "precision": "bf16", "scaler": "none", "device": "cuda"}
    return Schema(
        step_columns=STEP_COLUMN_NAMES,
        families=family_columns(
            family for family in FAMILIES if scenario.logprobs or family is not LOGPROBS
        ),
        shares=(share, *(_own_share(scenario, rank, family) for family in own)),
        layers=(
            *(Layer(name=name, share=0, elements=int(_ELEMENTS)) for name in scenario.layers),
            *(
                Layer(name=name, share=index, elements=0)
                for index, names in enumerate(own.values(), 1)
                for name in names
            ),
        ),
        facts=tuple({**facts, **scenario.facts}.items()),
    )


def _own_share(scenario: Scenario, rank: int, family: str) -> Share:
    return Share(group=family, shard_index=rank, shard_count=scenario.ranks, family=family)


def _compared(step: Step) -> dict[str, FloatArray]:
    """Return the row of tokens whose log-probabilities differ alike."""
    trainer = torch.linspace(-2.0 * step.policy_entropy, 0.0, 200, dtype=torch.float64)
    row_C = _COMPARISON.row(trainer, trainer - step.logprob_delta, None)
    return {LOGPROBS.name: row_C.reshape(1, -1).numpy()}


_COMPARISON = LogprobComparison()


def _outputs(step: Step, modules: tuple[str, ...]) -> dict[str, FloatArray]:
    """Return rows of modules' outputs, of a standard deviation of 1, and rows of logits."""
    columns = {
        "elements": _ELEMENTS,
        "sum": 0.0,
        "sum_squares": _ELEMENTS,
        "abs_max": 4.0,
        "zero_elements": 0.0,
        "nan_elements": 0.0,
        "inf_elements": 0.0,
        "near_overflow_elements": 0.0,
        **step.of_output,
    }
    index = {name: place for place, name in enumerate(ACTIVATIONS.names)}
    return {
        ACTIVATIONS.name: np.stack([_row(index, columns, nan) for _ in modules]),
        ATTENTION.name: np.array([[_ELEMENTS, 0.0, step.attention_logit]]),
        LOGITS.name: np.array([[1.0, 0.0, step.logsumexp, *[step.logsumexp] * 3]]),
        ROUTERS.name: _routers(step),
        FP8.name: _scaled(step),
    }


def _routers(step: Step) -> FloatArray:
    """Return the row of a router of 8 experts."""
    columns = {
        "tokens": _TOKENS,
        "nonfinite_tokens": 0.0,
        "entropy_tokens": _TOKENS,
        "entropy_sum": step.router_entropy * _TOKENS,
        "logit_abs_max": 4.0,
        "load_max": step.router_load,
        "experts": 8.0,
        "unused_experts": 0.0,
    }
    index = {name: place for place, name in enumerate(ROUTERS.names)}
    return np.stack([_row(index, columns, nan)])


def _scaled(step: Step) -> FloatArray:
    """Return the row of a layer with delayed scaling."""
    smallest, largest = step.fp8_range_used
    columns = {
        "tensors": 3.0,
        "scaled_tensors": 3.0,
        "saturated_tensors": float(largest > 1.0),
        "range_used_max": largest,
        "range_used_min": smallest,
        "scale_min": 2.0,
        "scale_max": 1024.0,
        "amax_max": 200.0 * largest,
    }
    if step.fp8_flushed is not None:
        flushed = 1000.0 * step.fp8_flushed
        columns = {
            "tensors": 3.0,
            "cast_tensors": 2.0,
            "input_elements": 1000.0,
            "input_flushed_elements": flushed,
        }
    index = {name: place for place, name in enumerate(FP8.names)}
    return np.stack([_row(index, columns, nan)])


def _tensors(step: Step, tensors: tuple[str, ...]) -> dict[str, FloatArray]:
    """Return rows of watched tensors, with slices of about the same range."""
    columns = {
        "elements": _ELEMENTS,
        "nonfinite_elements": 0.0,
        "sum": 0.0,
        "sum_squares": _ELEMENTS,
        "abs_sum": 0.8 * _ELEMENTS,
        "abs_max": 4.0,
        "abs_min": 1e-4,
        "swallowed_sum": 1e-3 * _ELEMENTS,
        "reduction": 1.0,
        "range_ratio": packed(3.0, 1),
        **step.of_tensor,
    }
    index = {name: place for place, name in enumerate(TENSORS.names)}
    return {TENSORS.name: np.stack([_row(index, columns, nan) for _ in tensors])}


_STEP_INDEX = {name: index for index, name in enumerate(STEP_COLUMN_NAMES)}
_BETA2 = 0.999
_TOKENS = 4096.0
_OPTIMIZER_INDEX = {name: index for index, name in enumerate(OPTIMIZER.names)}
_DISTRIBUTION_INDEX = {name: index for index, name in enumerate(DISTRIBUTION.names)}
_GRADIENT_INDEX = {name: index for index, name in enumerate(GRADIENT_COLUMN_NAMES)}


def _step_columns(step: Step, rank: int) -> FloatArray:
    columns: dict[str, float] = {
        "loss": nan if step.loss is None else step.loss,
        "loss_nonfinite": float(step.loss is None),
        "skipped": float(step.skipped),
        "learning_rate": step.learning_rate,
        "step_seconds": step.seconds,
        "compute_seconds": 0.6 * step.seconds,
        "probe_seconds": 1e-4,
    }
    if step.scale is not None:
        columns["loss_scale"] = step.scale
    if step.clip is not None:
        columns |= {"clip_max_norm": step.clip, "clip_norm": step.norm}
    return _row(_STEP_INDEX, {**columns, **step.of_rank.get(rank, {})}, nan)


def _gradients(step: Step, elements: float) -> FloatArray:
    """Return the columns of all elements; a non-finite step leaves the finite rest."""
    columns = {
        "sum_squares": step.norm**2,
        "abs_max": 3 * step.norm / elements**0.5,
        "zero_elements": 0.01 * elements,
        "inf_elements": step.inf_elements,
        "nan_elements": step.nan_elements,
        "elements": elements,
        # As of FP16 gradients, of which the smallest are often at its smallest number.
        "abs_min": 2.0**-24 / step.scale if step.scale else 1e-9 * step.norm,
        "abs_sum": 0.8 * step.norm * elements**0.5,
    }
    return _row(_GRADIENT_INDEX, columns, 0.0)


def _layer(step: Step, name: str, layers: int) -> FloatArray:
    whole = {key: float(value) for key, value in zip(
        GRADIENT_COLUMN_NAMES, _gradients(step, _ELEMENTS), strict=True)}  # fmt: skip
    whole["sum_squares"] /= layers
    return _row(_GRADIENT_INDEX, {**whole, **step.of_layer.get(name, {})}, 0.0)


def _updates(step: Step, squared_ratio: float, elements: float) -> FloatArray:
    """Return the optimizer's columns: Adam on FP32 weights, some of whose rows are rarely used."""
    columns = {
        "elements": elements,
        "weight_sum_squares": 4e-4 * elements,
        "nonfinite_weights": 0.0,
        "compared_elements": elements,
        "compared_sum_squares": 4e-4 * elements,
        "update_sum_squares": 4e-10 * elements,
        "moment_elements": elements,
        "active_elements": elements,
        "below_epsilon_elements": 0.05 * elements,
        "lost_epsilon_elements": 0.0,
        "squared_ratio_sum": squared_ratio * elements,
        "learning_rate": step.learning_rate,
        "learning_rate_min": step.learning_rate,
    }
    own = {name: share * elements for name, share in step.optimizer.items()}
    return _row(_OPTIMIZER_INDEX, {**columns, **own}, nan)


def _distribution(step: Step, elements: float) -> FloatArray:
    """Return how gradients are distributed: FP16 has lost what it would lose."""
    columns = {
        "elements": elements,
        "nonfinite_elements": step.inf_elements + step.nan_elements,
        "sum": 0.0,
        "sum_squares": step.norm**2,
        "nonzero_elements": 0.99 * elements,
    }
    if step.scale is not None:
        columns |= {"fp16_elements": 0.99 * elements, "flushed_elements": 0.0}
    own = {name: share * elements for name, share in step.distribution.items()}
    return _row(_DISTRIBUTION_INDEX, {**columns, **own}, nan)


def _row(index: Mapping[str, int], columns: Mapping[str, float], absent: float) -> FloatArray:
    row = np.full(len(index), absent)
    for name, value in columns.items():
        row[index[name]] = value
    return row


def _flat(snapshot: Snapshot) -> Iterator[tuple[Series, float]]:
    """Yield the samples as Prometheus stores them; of histograms sum and count."""
    for family in snapshot:
        name, keys = family.metric.prometheus_name, family.metric.label_names
        for sample in family.samples:
            labels = tuple((k, v) for k, v in zip(keys, sample.labels, strict=True) if v)
            if isinstance(sample.value, HistogramValue):
                yield (f"{name}_sum", labels), sample.value.sum
                yield (f"{name}_count", labels), float(sample.value.cumulative_counts[-1])
            else:
                yield (name, labels), sample.value
