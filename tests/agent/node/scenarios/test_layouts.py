"""Merged numbers against whole tensors, for every layout over ranks and of ranks over nodes."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mp_agent.node.merge.coverage import AssumedShares
from mp_agent.records.columns import GRADIENT_COLUMN_NAMES
from mp_agent.records.merged import MergedStep
from tests.agent.gradient_reference import reference_row
from tests.agent.node.nodes import merge_node_layers, merge_nodes
from tests.agent.node.placements import Placement, placements, spread

LOSSES = [1e20, 1.0, 1e-24, 3.0, 2.5, 1e17, 1e300, 7.0]


def merge(placement: Placement, nodes: Sequence[Sequence[int]]) -> MergedStep:
    present = {rank for ranks in nodes for rank in ranks}
    absent = [placement.rank_step(r) for r in range(placement.world_size) if r not in present]
    return merge_nodes(
        [[placement.rank_step(rank, loss=LOSSES[rank]) for rank in ranks] for ranks in nodes],
        placement.world_size,
        absent=absent,
    )


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(st.data(), placements())
def test_any_layout_on_any_nodes_is_the_whole_model(data, placement):
    everyone = list(range(placement.world_size))
    merged = merge(placement, spread(data.draw, everyone))
    on_one_node = merge(placement, [everyone])

    truth = {name: value for name, value in placement.truth().items() if math.isfinite(value)}
    assert {name: merged.get(name) for name in truth} == pytest.approx(truth, rel=1e-12)
    loss = math.fsum(LOSSES[: len(everyone)]) / len(everyone)
    assert merged.get("loss") == pytest.approx(loss, rel=1e-12)
    assert merged.gradients_complete
    assert merged.coverage == 1.0
    assert merged.columns == pytest.approx(on_one_node.columns, rel=1e-12)
    assert merged.gradients == pytest.approx(on_one_node.gradients, rel=1e-12)
    assert merged.replicas == on_one_node.replicas
    for name, other in merged.optimizers.items():
        assert other.complete
        alone = on_one_node.optimizers[name]
        assert other.gradients == pytest.approx(alone.gradients, rel=1e-12)
        own = placement.truth(name)
        there = {column: value for column, value in own.items() if math.isfinite(value)}
        assert other.gradients == pytest.approx(there, rel=1e-12)


@settings(max_examples=80, deadline=None)
@given(st.data(), placements())
def test_what_is_missing_is_missed_alike_on_any_nodes(data, placement):
    everyone = list(range(placement.world_size))
    present = sorted(data.draw(st.sets(st.sampled_from(everyone), min_size=1)))
    merged = merge(placement, spread(data.draw, present))
    on_one_node = merge(placement, [present])

    assert merged.columns == pytest.approx(on_one_node.columns, rel=1e-12)
    assert merged.gradients == pytest.approx(on_one_node.gradients, rel=1e-12)
    assert merged.optimizers.keys() == on_one_node.optimizers.keys()
    for name, other in merged.optimizers.items():
        alone = on_one_node.optimizers[name]
        assert other.gradients == pytest.approx(alone.gradients, rel=1e-12)
        assert other == replace(alone, families=other.families)
    assert merged.gradients_complete == on_one_node.gradients_complete
    assert merged.present_ranks == set(present)
    if merged.gradients_complete and not any(
        s.assumed for r in everyone for s in shares(placement, r)
    ):
        assert merged.get("elements") == placement.truth()["elements"]


def shares(placement: Placement, rank: int):
    return placement.shares[rank]


@settings(max_examples=50, deadline=None)
@given(st.data(), placements())
def test_layers_are_the_whole_tensors_on_any_nodes(data, placement):
    everyone = list(range(placement.world_size))
    nodes = spread(data.draw, everyone)
    assumed = AssumedShares()
    merge_nodes([[placement.rank_step(rank) for rank in ranks] for ranks in nodes], assumed=assumed)
    merged = merge_node_layers(
        [[placement.rank_layers(rank) for rank in ranks] for ranks in nodes], assumed=assumed
    )

    truth: dict[tuple[str, str, str], list[np.ndarray]] = {}
    for tensor in placement.tensors:
        key = (tensor.name, tensor.home, tensor.optimizer)
        truth.setdefault(key, []).append(tensor.elements)
    homes = {name: sum(key[0] == name for key in truth) for name, _, _ in truth}
    assert len(merged.names) == len(set(merged.names)) == len(truth)
    assert merged.complete
    for (name, home, _), parts in truth.items():
        label = f"{name}@{home}" if homes[name] > 1 else name
        expected = reference_row(np.concatenate(parts))
        found = merged.values[merged.names.index(label)]
        assert dict(zip(merged.family.names, found.tolist(), strict=True)) == pytest.approx(
            dict(
                zip(
                    GRADIENT_COLUMN_NAMES,
                    np.where(np.isfinite(expected), expected, np.nan),
                    strict=True,
                )
            ),
            rel=1e-12,
            nan_ok=True,
        )
