"""Canonical runs: the same ring records on every machine, and what the node agents make of them.

The rings are written by the real writer and read by the node agent's own `Run`: assembly, reports
between nodes, merge, account and conditions are the real ones. Clocks and the locks by which a rank
is seen to live are simulated. Every number is a multiple of 1/16 and small, so that sums of them
are exact in any order, and depends on its column, share, layer and step, so that a number in the
wrong place is another number.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from math import nan
from pathlib import Path
from unittest.mock import patch

import msgspec
import numpy as np

from mp_agent.node.conditions.tracker import ConditionTracker
from mp_agent.node.run.run import Run
from mp_agent.records.baseline import Baseline
from mp_agent.records.columns import (
    FAMILIES,
    LOGPROBS,
    OPTIMIZER,
    STATE,
    STEP_COLUMN_NAMES,
    TENSORS,
    WEIGHTS,
    ColumnFamily,
)
from mp_agent.records.schema import Layer, Schema, Share, family_columns
from mp_agent.records.steps import EndReason, FloatArray, LayerTable, Phase, StepRecord
from mp_agent.records.tensor_collections import TensorCollection, encode_collections, packed
from mp_agent.records.views import ScriptFindings
from mp_agent.ring import locations
from mp_agent.ring.writer import RingWriter
from mp_agent.settings import Settings
from tests.agent.node.builders import make_identity

START_UNIX_SECONDS = 1_700_000_000.0
STEP_SECONDS = 4.0
SAMPLED_STEPS = 8
"""Layers are written on every so many steps."""
LAYERS = ("embed.weight", "blocks.0.mlp.weight", "blocks.1.mlp.weight", "head.weight")
MODULES = ("blocks.0", "blocks.1")

_NO_CONDITIONS = (
    "mp_agent.node.run.state.ConditionTracker",
    partial(ConditionTracker, conditions=()),
)

Values = Mapping[str, float]
Changes = Callable[[int, int], Values]
"""From rank and sequence number to what is otherwise than usual: of a column of the step by its
name, of a family by `family.column`, of one of its layers by `family.column@layer`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What happens in a run.

    shards: into how many the gradients are split, each held by the ranks that remain. steps: how
    many all ranks complete. first_step: the trainer's own step of the first one. families: what is
    measured. judged: whether the node agents judge conditions. baseline: of good runs. after: what
    happens then.
    """

    name: str
    steps: int
    changes: Changes
    ranks: int = 2
    nodes: int = 1
    shards: int = 1
    first_step: int = 1
    families: tuple[ColumnFamily, ...] = FAMILIES
    judged: bool = True
    facts: Mapping[str, str] = field(default_factory=dict)
    findings: ScriptFindings | None = None
    baseline: Baseline | None = None
    after: Callable[["Player"], None] = lambda player: None


class Clock:
    """The time of all processes."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @property
    def unix_seconds(self) -> float:
        """Seconds since the epoch."""
        return START_UNIX_SECONDS + self.seconds

    def unix_ns(self) -> int:
        """Nanoseconds since the epoch."""
        return round(self.unix_seconds * 1e9)


@contextmanager
def simulated_clock() -> Iterator[tuple[Clock, set[str]]]:
    """Yield the clock, and the paths of the rings whose ranks live.

    Conditions are judged after every step, however long that takes here.
    """
    clock, alive = Clock(), set[str]()
    with ExitStack() as patches:
        for name, replacement in {
            "time.time": lambda: clock.unix_seconds,
            "time.time_ns": clock.unix_ns,
            "mp_agent.ring.reader.is_locked": lambda fd: (
                os.readlink(f"/proc/self/fd/{fd}") in alive
            ),
            "mp_agent.node.conditions.tracker.PROCESSOR_SHARE": 1.0,
        }.items():
            patches.enter_context(patch(name, replacement))
        yield clock, alive


class Player:
    """Plays a script; `runs` are the node agents' own, the root's first."""

    def __init__(self, script: Script, directory: Path, clock: Clock, alive: set[str]) -> None:
        self.script = script
        self._clock = clock
        self._alive = alive
        path = directory / f"{script.name}.baseline.json" if script.baseline else None
        if path is not None:
            path.write_bytes(msgspec.json.encode(script.baseline))
        settings = Settings(dir=directory, log_dir=directory / "log", baseline=path)
        self.run_dirs = [
            locations.run_directory(directory / f"node-{node}", script.name)
            for node in range(script.nodes)
        ]
        with nullcontext() if script.judged else patch(*_NO_CONDITIONS):
            self.runs = [Run(run_dir, settings) for run_dir in self.run_dirs]
        if script.findings:
            self.runs[0].script_findings = script.findings
            self.runs[0].url = "http://node-0:9464"
        self.rings: dict[int, RingWriter] = {}
        self.schemas: dict[int, Schema] = {}
        for rank in range(script.ranks):
            self._launch(rank)

    def play(self) -> None:
        """Write all steps; the agents read each one as it comes."""
        for sequence in range(1, self.script.steps + 1):
            self.pass_time(STEP_SECONDS)
            for rank in self.rings:
                self.write(rank, sequence)
            self.poll()
        self.script.after(self)

    def write(self, rank: int, sequence: int) -> None:
        """Let a rank complete a step."""
        schema, changes = self.schemas[rank], self.script.changes(rank, sequence)
        sampled = sequence % SAMPLED_STEPS == 0
        self.rings[rank].write_step(
            StepRecord(
                sequence=sequence,
                step=self.script.first_step + sequence - 1,
                time_unix_ns=self._clock.unix_ns(),
                values=_step_values(rank, sequence, changes),
                families={
                    family.name: _rows(family, schema, sequence, changes)
                    for family in self.script.families
                    if not family.compared_only and (sampled or not _only_sampled(family))
                },
            )
        )
        if sampled:
            tables = {
                family.name: _layer_rows(family, schema, sequence, changes)
                for family in self.script.families
            }
            self.rings[rank].write_layers(LayerTable(sequence=sequence, families=tables))
        self.rings[rank].stamp(Phase.FORWARD, sequence=sequence + 1)

    def pass_time(self, seconds: float) -> None:
        """Let time pass."""
        self._clock.seconds += seconds

    def poll(self) -> None:
        """Let the agents read their rings, and the root merge what the others report."""
        now_seconds = self._clock.seconds
        for run in self.runs:
            run.poll(now_seconds)
        for run in self.runs[1:]:
            while (report := run.next_report()) is not None:
                run.acknowledge(self.runs[0].receive(report))
        self.runs[0].poll(now_seconds)

    def kill(self, rank: int) -> None:
        """Let a rank die without a word."""
        self._alive.discard(str(self.rings[rank].path))

    def end(self, reason: EndReason) -> None:
        """Let all ranks say how they ended, and be gone."""
        for rank, ring in self.rings.items():
            ring.end(reason)
            self.kill(rank)
        self.poll()

    def close(self) -> None:
        """Close rings and runs."""
        for ring in self.rings.values():
            ring.close()
        for run in self.runs:
            run.close()

    def _launch(self, rank: int) -> None:
        script = self.script
        local = script.ranks // script.nodes
        identity = make_identity(
            rank,
            run=script.name,
            world_size=script.ranks,
            local_rank=rank % local,
            local_world_size=local,
            node_rank=rank // local,
            created_unix_ns=self._clock.unix_ns() + rank,
        )
        path = locations.ring_path(self.run_dirs[rank // local], identity)
        self.rings[rank] = ring = RingWriter.create(path, identity)
        self.schemas[rank] = schema_of(script, rank)
        ring.write_schema(self.schemas[rank])
        ring.stamp(Phase.FORWARD, sequence=1)
        self._alive.add(str(path))


def schema_of(script: Script, rank: int) -> Schema:
    """Return a schema with every column: of two optimizers, and of all that is measured."""
    main = Share(
        group="main",
        shard_index=rank % script.shards,
        shard_count=script.shards,
        replica_index=rank // script.shards,
        replica_count=script.ranks // script.shards,
    )
    parameters = (main, replace(main, group="head", optimizer="1", joint=True))
    own = {f.name: _modules(f) for f in script.families if not f.of_parameters}
    shares = tuple(
        Share(
            group=name,
            family=name,
            shard_index=0 if name == STATE.name else rank,
            shard_count=1 if name == STATE.name else script.ranks,
            replica_index=rank if name == STATE.name else 0,
            replica_count=script.ranks if name == STATE.name else 1,
        )
        for name in own
    )
    layers = [
        *(Layer(name=name, share=int(name == LAYERS[-1]), elements=1024) for name in LAYERS),
        *(
            Layer(name=name, share=index, elements=0)
            for index, names in enumerate(own.values(), len(parameters))
            for name in names
        ),
    ]
    facts = {"strategy": "fsdp", "precision": "fp16", "scaler": "grad_scaler", "device": "cuda"}
    facts["trained_ratio"] = "0.75"
    formats = {"autocast_format": "fp16", "parameter_format": "fp32", "gradient_format": "fp32"}
    collections = encode_collections([TensorCollection("mlp", ("mlp",))])
    return Schema(
        step_columns=STEP_COLUMN_NAMES,
        families=family_columns(script.families),
        shares=(*parameters, *shares),
        layers=tuple(layers),
        facts=tuple({**facts, **formats, "collections": collections, **script.facts}.items()),
    )


def _modules(family: ColumnFamily) -> tuple[str, ...]:
    if family is LOGPROBS:
        return ()
    if family is TENSORS:
        return ("advantages",)
    return ("rope.cos", "queue") if family is STATE else MODULES


def _only_sampled(family: ColumnFamily) -> bool:
    return len(family.sampled) == len(family.columns)


def usual(*places: int) -> float:
    """Return a number from 1 to below 2: a sixteenth that depends on all places."""
    weights = (5, 3, 7, 11)
    return 1.0 + sum(one * weight for one, weight in zip(places, weights, strict=False)) % 16 / 16


def _step_values(rank: int, sequence: int, changes: Values) -> FloatArray:
    known = {
        name: 0.0
        for name in STEP_COLUMN_NAMES
        if name.startswith(("guard_", "local_grad_nonfinite"))
    } | {
        "loss": 2.0 + (sequence * 5 + rank) % 8 / 16,
        "loss_nonfinite": 0.0,
        "loss_scale": 1024.0,
        "skipped": 0.0,
        "clip_max_norm": 64.0,
        "clip_norm": 48.0,
        "learning_rate": 0.0625,
        "lowest_learning_rate": 0.0625,
        "gradients_reduced": 1.0,
        "weight_sample": nan,
        "gradients_measured": 1.0,
        "gradients_replaced": 0.0,
        "gradients_add_up": 0.0,
        "backwards_discarded": nan,
        "late_clipping": nan,
        "left_in_evaluation": nan,
        "step_repeated": nan,
        "step_scaled": nan,
        "optimizer_never_steps": nan,
        "clips_nothing": nan,
        "seed_repeated": nan,
        "epoch_repeated": nan,
        "fp16_without_loss_scale": nan,
        "loss_input_mismatch": nan,
        "targets_broadcast": nan,
        "clipped_apart": nan,
        "clipped_by_shard": nan,
        "targets_misaligned": nan,
        "padding_in_targets": nan,
        "targets_seen": nan,
        "evaluated_in_training": nan,
        "batch_norm_momentum": nan,
        "accumulation_bypassed": nan,
        "betas_swapped": nan,
        "loss_in_16_bits": nan,
        "nothing_loaded": nan,
        "local_grad_nonfinite_backward": nan,
        "loss_factor": 1.0,
        "gradient_factor": 1.0,
        "unheld_parameters": 0.0,
        "unchanged_parameters": 0.0,
        "cut_off_parameters": 0.0,
        "parted_parameters": 0.0,
        "resumed_without_state": nan,
        "schedule_behind": nan,
        "another_model": nan,
        "learning_rates_zero": 0.0,
        "rounded_ratio": 0.25,
        "rounding_loss": 0.125,
        "step_seconds": STEP_SECONDS,
    }
    columns = {
        name: usual(place, rank, sequence) / 8 for place, name in enumerate(STEP_COLUMN_NAMES)
    }
    return _row(STEP_COLUMN_NAMES, {**columns, **known}, changes)


def _rows(family: ColumnFamily, schema: Schema, sequence: int, changes: Values) -> FloatArray:
    """Return [G, C]: NaN for shares that the family is not of."""
    rows = [
        _family_row(family, share, index, sequence, changes, layers=len(LAYERS))
        for index, share in enumerate(schema.shares)
    ]
    return np.stack(rows)


def _layer_rows(family: ColumnFamily, schema: Schema, sequence: int, changes: Values) -> FloatArray:
    """Return [L, C]: NaN for layers that the family is not of."""
    rows = [
        _family_row(family, schema.shares[layer.share], index, sequence, changes, layer=layer.name)
        for index, layer in enumerate(schema.layers)
    ]
    return np.stack(rows)


def _family_row(
    family: ColumnFamily,
    share: Share,
    index: int,
    sequence: int,
    changes: Values,
    *,
    layers: int = 1,
    layer: str = "",
) -> FloatArray:
    if share.family != ("" if family.of_parameters else family.name):
        return np.full(len(family.columns), nan)
    values = {
        name: layers * usual(place, share.shard_index, index, sequence)
        for place, name in enumerate(family.names)
    }
    for name in family.names:
        if name.startswith(("nan_", "inf_", "nonfinite_")):
            values[name] = nan if name.endswith("_call") else 0.0
    values[family.size] = 1024.0 * layers
    if family is TENSORS:
        values["range_ratio"] = packed(3.0, 1)
    if family in (WEIGHTS, STATE):
        copied = -1.0 if layer == "queue" else 1.0
        values |= {"bits": 4096.0 + 16 * index + sequence, "varied": 1.0, "copied": copied}
    if family is OPTIMIZER:
        ratios = 1024.0 * layers * usual(index, sequence)
        values |= {"active_elements": 1024.0 * layers, "squared_ratio_sum": ratios}
    if family is LOGPROBS:
        values |= {"trainer_sum_squares": 16384.0, "delta_sum_squares": 4096.0}
        values["density_tokens"] = 0.0
    own = {}
    for key, value in changes.items():
        column, _, only = key.removeprefix(f"{family.name}.").partition("@")
        if key.startswith(f"{family.name}.") and (not only or only == layer):
            own[column] = value
    return _row(family.names, values, own)


def _row(names: tuple[str, ...], values: Values, changes: Values) -> FloatArray:
    return np.array([changes.get(name, values[name]) for name in names])
