"""Models laid out over ranks in every way that training knows, with the truth about them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from mp_agent.node.merge.node_layers import RankLayers
from mp_agent.node.merge.node_steps import RankStep
from mp_agent.records.columns import GRADIENT_COLUMN_NAMES
from mp_agent.records.schema import Layer, Schema, Share
from tests.agent.gradient_reference import reference_row
from tests.agent.node.builders import make_record, make_schema, rank_layers

EDGES = (0.0, -0.0, math.nan, math.inf, -math.inf, 1e20, -1e20, 1e-24, 5e-324, 1.0, -3.5, 1e-8)


@dataclass(frozen=True)
class Tensor:
    """One parameter, whole."""

    name: str
    home: str
    optimizer: str
    elements: np.ndarray


@dataclass
class Placement:
    """A model over ranks: what each rank writes, and the tensors that it stands for."""

    world_size: int
    shares: dict[int, list[Share]] = field(default_factory=dict)
    parts: dict[int, list[list[tuple[str, np.ndarray]]]] = field(default_factory=dict)
    """Per rank and share, the (name, elements) of its layers."""
    tensors: list[Tensor] = field(default_factory=list)

    def place(self, rank: int, share: Share, parts: list[tuple[str, np.ndarray]]) -> None:
        self.shares.setdefault(rank, []).append(share)
        self.parts.setdefault(rank, []).append(parts)

    def rank_step(self, rank: int, sequence: int = 1, **values: float) -> RankStep:
        rows = [
            reference_row(np.concatenate([np.empty(0), *(elements for _, elements in parts)]))
            for parts in self.parts[rank]
        ]
        return RankStep(rank, self.schema(rank), make_record(sequence, values, rows))

    def rank_layers(self, rank: int) -> RankLayers:
        rows = [reference_row(elements) for parts in self.parts[rank] for _, elements in parts]
        table = np.stack(rows) if rows else np.empty((0, len(GRADIENT_COLUMN_NAMES)))
        return rank_layers(rank, self.schema(rank), table)

    def schema(self, rank: int) -> Schema:
        layers = tuple(
            Layer(name=name, share=index, elements=len(elements))
            for index, parts in enumerate(self.parts[rank])
            for name, elements in parts
        )
        plain = make_schema(*self.shares[rank])
        return Schema(
            step_columns=plain.step_columns,
            families=plain.families,
            shares=plain.shares,
            layers=layers,
        )

    def truth(self, optimizer: str = "") -> dict[str, float]:
        """Return the columns of all tensors of an optimizer, from the whole elements."""
        own = [tensor.elements for tensor in self.tensors if tensor.optimizer == optimizer]
        row = reference_row(np.concatenate(own))
        return dict(zip(GRADIENT_COLUMN_NAMES, row.tolist(), strict=True))


elements = st.lists(
    st.one_of(st.sampled_from(EDGES), st.floats(width=32)), min_size=1, max_size=12
).map(np.array)


@st.composite
def placements(draw: st.DrawFn, *, assumed: bool = True) -> Placement:
    """Draw a model over 1 to 8 ranks whose groups are laid out in different ways."""
    world = draw(st.integers(1, 8))
    placement = Placement(world)
    kinds = ["replicate", "shard", "hybrid", "stages", "experts"]
    chosen = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=3, unique=True))
    chosen += ["assumed"] if assumed and draw(st.booleans()) else []
    for number, kind in enumerate(chosen):
        optimizer = draw(st.sampled_from(["", "", "", "1"])) if number else ""
        for ranks, name in _homes(kind, world, number):
            tensors = [
                Tensor(f"{name}.{i}", _span(ranks), optimizer, draw(elements)) for i in range(2)
            ]
            _lay_out(placement, kind, ranks, f"{kind} {number} {ranks}", tensors, draw)
    return placement


def _homes(kind: str, world: int, number: int) -> list[tuple[list[int], str]]:
    """Return which ranks hold what; stages and experts have equal names in different homes."""
    everyone = list(range(world))
    if kind == "stages" and world > 1:
        half = world // 2
        return [(everyone[:half], f"block{number}"), (everyone[half:], f"block{number}")]
    if kind == "experts":
        return [([rank], f"expert{number}") for rank in everyone]
    return [(everyone, f"layer{number}")]


def _lay_out(
    placement: Placement,
    kind: str,
    ranks: Sequence[int],
    group: str,
    tensors: list[Tensor],
    draw: st.DrawFn,
) -> None:
    optimizer, home = tensors[0].optimizer, tensors[0].home
    if kind == "assumed":
        _lay_out_assumed(placement, ranks, group, tensors, independent=draw(st.booleans()))
        return
    splits = [n for n in range(1, len(ranks) + 1) if len(ranks) % n == 0]
    shards = {
        "replicate": 1,
        "shard": len(ranks),
        "hybrid": draw(st.sampled_from(splits)),
        "stages": draw(st.sampled_from(splits)),
        "experts": 1,
    }[kind]
    placement.tensors += tensors
    for place, rank in enumerate(ranks):
        share = Share(
            group=group,
            shard_index=place % shards,
            shard_count=shards,
            replica_index=place // shards,
            replica_count=len(ranks) // shards,
            optimizer=optimizer,
            home=home,
        )
        parts = [(t.name, np.array_split(t.elements, shards)[place % shards]) for t in tensors]
        placement.place(rank, share, parts)


def _lay_out_assumed(
    placement: Placement,
    ranks: Sequence[int],
    group: str,
    tensors: list[Tensor],
    *,
    independent: bool,
) -> None:
    share = Share(group=group, assumed=True, optimizer=tensors[0].optimizer)
    for rank in ranks:
        # Of other sizes, so that the rows of no two ranks are equal.
        grown = [np.append(t.elements, np.ones(rank + 1)) for t in tensors]
        own = grown if independent else [t.elements for t in tensors]
        named = [Tensor(t.name, "", t.optimizer, e) for t, e in zip(tensors, own, strict=True)]
        if independent or rank == ranks[0]:
            placement.tensors += named
        placement.place(rank, share, [(t.name, t.elements) for t in named])


def _span(ranks: Sequence[int]) -> str:
    return f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else str(ranks[0])


def spread(draw: st.DrawFn, ranks: Sequence[int]) -> list[list[int]]:
    """Draw a way to put ranks on nodes, in any order of nodes and of ranks."""
    nodes: dict[int, list[int]] = {}
    for rank in draw(st.permutations(ranks)):
        nodes.setdefault(draw(st.integers(0, max(len(ranks) - 1, 0))), []).append(rank)
    return draw(st.permutations(list(nodes.values())))
