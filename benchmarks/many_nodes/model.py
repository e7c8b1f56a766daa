"""A model laid out over many ranks, whose rows cost nothing to make and whose truth is known."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import fsum, nan, sqrt

import numpy as np

from mp_agent.records.columns import GRADIENT_COLUMN_NAMES, GRADIENTS, WEIGHTS, step_columns
from mp_agent.records.schema import Layer, RankIdentity, Schema, Share, family_columns
from mp_agent.records.steps import FloatArray, LayerTable, StepRecord

RUN = "llama-70b-pretraining"
LAUNCHED_UNIX_NS = 1_700_000_000_000_000_000
"""Launch time of every rank; the launch has a name, so that no clock is asked."""

_KINDS = (
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "adapter.weight",
)
_ELEMENTS = 2.0**22
_STEP_COLUMNS = step_columns(guarded=False)
_SPREAD = 4099
"""Prime: so many layer tables start at different places of the pool."""
_PLACES = [
    _STEP_COLUMNS.index(name)
    for name in (
        "loss",
        "clip_norm",
        "step_seconds",
        "compute_seconds",
        "probe_seconds",
    )
]
_GRADIENT_PLACES = [GRADIENT_COLUMN_NAMES.index(name) for name in ("sum_squares", "abs_max")]
_NAN_PLACES = [GRADIENT_COLUMN_NAMES.index(name) for name in ("sum_squares", "nan_elements")]
_NAN_SPREAD = 7919
"""Prime: so that any rank may be the one with a NaN."""
_GOLDEN, _PLASTIC = 0.6180339887498949, 0.7548776662466927


@dataclass(frozen=True)
class Model:
    """Who holds what, and the rows that each rank writes.

    placement: `ddp`, every rank has all layers; `fsdp`, every rank has a shard of all layers;
    `hsdp`, so has every rank of a node, and the nodes are replicas.
    """

    nodes: int
    placement: str
    layers: int = 1000
    ranks_per_node: int = 8
    nan_steps: int = 0
    """Every so many steps, one rank's gradients have a NaN; 0 for none. Not with `ddp`."""

    @property
    def world_size(self) -> int:
        """Ranks of the run."""
        return self.nodes * self.ranks_per_node

    @property
    def shards(self) -> int:
        """Parts into which each tensor is split."""
        return {"ddp": 1, "fsdp": self.world_size, "hsdp": self.ranks_per_node}[self.placement]

    def ranks(self, node: int) -> range:
        """Return the ranks of a node."""
        first = node * self.ranks_per_node
        return range(first, first + self.ranks_per_node)

    def identity(self, rank: int) -> RankIdentity:
        """Return who a rank says that it is."""
        node, local = divmod(rank, self.ranks_per_node)
        return RankIdentity(
            run=RUN,
            attempt=0,
            launch="simulation",
            rank=rank,
            world_size=self.world_size,
            local_rank=local,
            local_world_size=self.ranks_per_node,
            node_rank=node,
            host=f"node-{node:04d}.cluster.example",
            pid=1000 + local,
            created_unix_ns=LAUNCHED_UNIX_NS + rank,
            torch_version="2.13.0",
            version="",
        )

    def schema(self, rank: int) -> Schema:
        """Return how a rank's rows are to be read."""
        share = Share(
            group=self.placement,
            shard_index=rank % self.shards,
            shard_count=self.shards,
            replica_index=rank // self.shards,
            replica_count=self.world_size // self.shards,
            home=f"0-{self.world_size - 1}",
        )
        return Schema(
            step_columns=_STEP_COLUMNS,
            families=family_columns(),
            shares=(share,),
            layers=self._named_layers,
            facts=(("strategy", self.placement), ("precision", "fp16"), ("scaler", "GradScaler")),
        )

    def step(self, rank: int, sequence: int, *, sampled: bool = False) -> StepRecord:
        """Return what a rank writes of a step; sampled: whether layers are looked at on it."""
        shard, own = rank % self.shards, _fraction(rank, sequence)
        sum_squares = self._sum_squares(shard, sequence)
        values = self._usual_values.copy()
        values[_PLACES] = (
            self._loss(rank, sequence),
            sqrt(sum_squares),
            1.0 + own / 100,
            0.2 + own / 100,
            1e-3 + own / 1e4,
        )
        gradients = self._usual_row.copy()
        gradients[0, _GRADIENT_PLACES] = (sum_squares, 0.25 + _fraction(shard, sequence) / 4)
        if rank == self.nan_rank(sequence):
            gradients[0, _NAN_PLACES] = (nan, 1.0)
        return StepRecord(
            sequence=sequence,
            step=sequence,
            time_unix_ns=time.time_ns(),
            values=values,
            families={
                GRADIENTS.name: gradients,
                **(self._bits(shard, sequence) if sampled else {}),
            },
        )

    def nan_rank(self, sequence: int) -> int | None:
        """Return the rank whose gradients have a NaN on this step."""
        if not self.nan_steps or sequence % self.nan_steps:
            return None
        return sequence * _NAN_SPREAD % self.world_size

    def table(self, rank: int, sequence: int) -> LayerTable:
        """Return what a rank writes of the layers of a step: a view into a pool that all share."""
        start = self._place(rank % self.shards, sequence)
        rows = self._pool[start : start + self.layers]
        return LayerTable(sequence=sequence, families={GRADIENTS.name: rows})

    def norm(self, sequence: int) -> float:
        """Return the norm of all gradients of a step, by the closed form of the shards' rows."""
        return sqrt(fsum(self._sum_squares(shard, sequence) for shard in range(self.shards)))

    def loss(self, sequence: int) -> float:
        """Return the mean of the ranks' losses of a step."""
        losses = (self._loss(rank, sequence) for rank in range(self.world_size))
        return fsum(losses) / self.world_size

    def layer_norms(self, sequence: int) -> FloatArray:
        """Return the norm of each layer on a sampled step."""
        column = GRADIENT_COLUMN_NAMES.index("sum_squares")
        tables = [
            self._pool[place : place + self.layers, column]
            for place in (self._place(shard, sequence) for shard in range(self.shards))
        ]
        return np.sqrt([fsum(layer) for layer in zip(*tables, strict=True)])

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Names of the layers, in module order."""
        return tuple(layer.name for layer in self._named_layers)

    @cached_property
    def _named_layers(self) -> tuple[Layer, ...]:
        elements = max(int(_ELEMENTS) // self.shards, 1)
        blocks = (divmod(index, len(_KINDS)) for index in range(self.layers))
        return tuple(
            Layer(name=f"model.layers.{block}.{_KINDS[kind]}", share=0, elements=elements)
            for block, kind in blocks
        )

    @cached_property
    def _pool(self) -> FloatArray:
        """Rows of layers [N, C] with numbers like real ones, which no compression makes small."""
        random = np.random.default_rng(17)
        rows = self.layers + _SPREAD
        columns = {
            "sum_squares": random.lognormal(-6.0, 2.0, rows),
            "abs_max": random.lognormal(-9.0, 1.0, rows).astype(np.float32),
            "zero_elements": random.poisson(40.0, rows),
            "elements": np.full(rows, max(_ELEMENTS // self.shards, 1.0)),
        }
        return np.stack(
            [np.asarray(columns.get(n, np.zeros(rows)), float) for n in GRADIENT_COLUMN_NAMES],
            axis=1,
        )

    @cached_property
    def _usual_values(self) -> FloatArray:
        """Step columns that are the same on every rank and step."""
        usual = {
            "loss_nonfinite": 0.0,
            "loss_scale": 65536.0,
            "skipped": 0.0,
            "clip_max_norm": 1.0,
            "learning_rate": 3e-4,
        }
        return np.array([usual.get(name, nan) for name in _STEP_COLUMNS])

    @cached_property
    def _usual_row(self) -> FloatArray:
        elements = self.layers * max(_ELEMENTS // self.shards, 1.0)
        return np.array([[elements if n == "elements" else 0.0 for n in GRADIENT_COLUMN_NAMES]])

    def _sum_squares(self, shard: int, sequence: int) -> float:
        return (0.5 + _fraction(shard, sequence)) / self.shards

    def _loss(self, rank: int, sequence: int) -> float:
        return float(np.float32(2.0 + _fraction(rank, sequence) / 4))

    def _bits(self, shard: int, sequence: int) -> dict[str, FloatArray]:
        digest = (shard * 2654435761 + sequence * 40503) % 2**32
        return {WEIGHTS.name: np.array([[digest, nan, self.layers * _ELEMENTS / self.shards]])}

    def _place(self, shard: int, sequence: int) -> int:
        return (shard * 31 + sequence * 7) % _SPREAD


def _fraction(place: int, sequence: int) -> float:
    """Return a number in [0, 1) with all bits of a float64 in use."""
    return ((place + 1) * _GOLDEN + sequence * _PLASTIC) % 1.0


def sampled_up_to(sampled: Iterable[int], after: int, newest: int) -> list[int]:
    """Return the sampled steps in (after, newest], ascending."""
    return sorted(sequence for sequence in sampled if after < sequence <= newest)
