"""Megatron-Core's numbers are those that it gives itself, and those of one process in float64."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mp_agent.records.columns import (
    BACKWARDS_DISCARDED,
    GRADIENTS_ADD_UP,
    STEP_REPEATED,
    UNHELD_PARAMETERS,
)
from tests.agent.probe.reference import row_of
from tests.agent.probe.rings import merge_layer_tables, merge_rings, read_ring, rows_by_name
from tests.frameworks.megatron_variants import (
    CLIP,
    LEFT_OUT,
    MISTAKE_STEPS,
    MISTAKES,
    POISONED_STEP,
    VARIANTS,
    Variant,
)
from tests.frameworks.torchrun import torchrun

OF_MEGATRON = 1e-5
"""Relative error of the norm, against what `optimizer.step()` returned."""
OF_FLOAT64 = {"fp32": 1e-4, "bf16": 6e-2, "fp16": 1e-2}
"""Relative error of a layer's norm, against one process in float64."""

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.long]

ORDER = (GRADIENTS_ADD_UP, BACKWARDS_DISCARDED, STEP_REPEATED)

WORLDS = sorted({variant.world for variant in VARIANTS.values()})


@pytest.fixture(scope="module")
def trained(framework, tmp_path_factory) -> Path:
    framework("megatron.core")
    directory: Path = tmp_path_factory.mktemp("megatron")
    torchrun("tests.frameworks.megatron_job", str(directory), "reference", world=1)
    for world in WORLDS:
        names = sorted(
            (name for name, variant in VARIANTS.items() if variant.world == world),
            key=lambda name: VARIANTS[name].layout,
        )
        names += MISTAKES if world == 2 else ()
        torchrun("tests.frameworks.megatron_job", str(directory), *names, world=world)
    return directory


@pytest.fixture
def variant(name) -> Variant:
    return VARIANTS[name]


@pytest.fixture
def rings(trained, name, variant):
    return {
        rank: read_ring(trained / name / f"rank{rank}.ring", one_schema=False)
        for rank in range(variant.world)
    }


@pytest.fixture
def seen(trained, name, variant) -> list[dict[str, Any]]:
    """What Megatron says of each step; the loss where there is one, on a last stage."""
    ranks = [
        json.loads((trained / name / f"seen{rank}.json").read_text())["steps"]
        for rank in range(variant.world)
    ]
    last: list[dict[str, Any]] = ranks[-1]
    return last


@pytest.mark.parametrize("name", VARIANTS)
class TestEveryLayout:
    def test_every_step_is_one_of_megatrons(self, rings, seen, name):
        merged = merge_rings(rings)
        assert [step.sequence for step in merged] == list(range(1, len(seen) + 1))
        assert [step.get("skipped") for step in merged] == [float(e["skipped"]) for e in seen]
        assert all(each.agree for step in merged for each in step.replicas.values())
        for ring in rings.values():
            assert ring.state.probe_errors == 0
            assert ring.state.unsupported == (
                ("local gradients under dp",) if "bare" in name else ()
            )

    def test_norm_and_loss_are_megatrons_own(self, rings, seen, name):
        for found, own in zip(merge_rings(rings), seen, strict=True):
            if own["loss"] is not None and np.isfinite(own["loss"]):
                assert found.get("loss") == pytest.approx(own["loss"], rel=2e-6)
            if own["norm"] is None or not np.isfinite(own["norm"]):
                continue
            assert found.gradients_complete
            squares = found.get("sum_squares")
            assert squares is not None
            assert np.sqrt(squares) == pytest.approx(own["norm"], rel=OF_MEGATRON)

    def test_loss_scale_is_that_of_the_step(self, rings, seen, name, variant):
        scales = [step.get("loss_scale") for step in merge_rings(rings)]
        if variant.dtype == "fp16" or variant.constant_scale:
            assert scales == [each["scale"] for each in seen]
        else:
            assert scales == [None] * len(seen)

    def test_clipping_is_that_to_the_limit(self, rings, seen, name, variant):
        for found, own in zip(merge_rings(rings), seen, strict=True):
            if variant.clips and not variant.by_parts and not own["skipped"]:
                assert found.get("clip_max_norm") == CLIP
                norm = own["norm"] if np.isfinite(own["norm"]) else None
                assert found.get("clip_norm") == pytest.approx(norm)
            else:
                assert found.get("clip_max_norm") is None

    def test_weights_are_the_same_without_the_probe(self, trained, name, variant):
        for rank in range(variant.world):
            files = (trained / name / part / f"seen{rank}.json" for part in (".", "unwatched"))
            watched, unwatched = (json.loads(each.read_text()) for each in files)
            assert watched["weights"] == unwatched["weights"]
            assert repr(watched["steps"]) == repr(unwatched["steps"])

    def test_facts_are_those_of_the_layout(self, rings, name, variant):
        for rank, ring in rings.items():
            facts = dict(ring.schema.facts)
            assert facts.get("data_ranks", "") == data_ranks_of(variant, rank)
            assert facts["strategy"] == strategy_of(variant)
            assert facts["measuring_point"] == "engine_step"
            assert facts["precision"] == variant.dtype
            assert variant.dtype in facts["parameter_format"].split("+")
            assert facts["master_format"] == ("" if variant.dtype == "fp32" else "fp32")
            assert facts["gradient_format"] == gradient_format_of(variant)


FINITE = [name for name, variant in VARIANTS.items() if variant.scale < 2.0**15]
"""Those whose gradients of step 1 do not overflow."""


@pytest.mark.parametrize("name", FINITE)
def test_layers_are_those_of_one_process(trained, rings, name, variant):
    expected = reference(trained, variant)
    layers = rows_by_name(merge_layer_tables(rings, sequences={1})[1])
    assert layers.keys() == expected.keys()
    tolerance = OF_FLOAT64[variant.dtype]
    for layer, row in expected.items():
        assert np.sqrt(layers[layer][0]) == pytest.approx(np.sqrt(row[0]), rel=tolerance)
        assert layers[layer][5] == row[5]


POISONED = [name for name, variant in VARIANTS.items() if variant.poisoned]


@pytest.mark.parametrize("name", POISONED)
class TestNonfiniteGradients:
    def test_all_elements_are_counted_once(self, trained, rings, name, variant):
        elements = sum(gradient.numel() for gradient in gradients_of(trained, variant).values())
        assert merge_rings(rings)[POISONED_STEP - 1].get("nan_elements") == elements

    def test_rank_is_that_of_the_data(self, rings, name):
        found = {
            rank: ring.column("local_grad_nonfinite_elements")[POISONED_STEP - 1] > 0.0
            for rank, ring in rings.items()
        }
        assert found == {0: False, 1: True}


HALVES = [
    name
    for name, variant in VARIANTS.items()
    if variant.dp == variant.world == 2 and name in FINITE and not (variant.bare or variant.moe)
]


@pytest.mark.parametrize("name", HALVES)
def test_local_norm_is_that_of_the_ranks_own_data(trained, rings, name, variant):
    halves = halves_of(trained, variant)
    for rank, ring in rings.items():
        squares = sum(float(each.pow(2).sum()) for each in halves[rank].values())
        expected = variant.dp * np.sqrt(squares)
        tolerance = OF_FLOAT64[variant.dtype]
        assert ring.column("local_grad_norm")[0] == pytest.approx(expected, rel=tolerance)


def test_skips_of_a_scale_that_is_too_large_are_all_counted(trained):
    name = next(name for name, variant in VARIANTS.items() if variant.scale == 2.0**36)
    rings = {rank: read_ring(trained / name / f"rank{rank}.ring") for rank in range(2)}
    skipped = [step.get("skipped") for step in merge_rings(rings)]
    assert len(skipped) == 30
    assert 10 < skipped.count(1.0) < 30


@pytest.mark.parametrize("name", ["a layer is left out", "nothing reduces slices"])
def test_mistakes_are_seen(trained, name):
    rings = {
        rank: read_ring(trained / name / f"rank{rank}.ring", one_schema=False) for rank in range(2)
    }
    steps = merge_rings(rings)
    assert len(steps) == MISTAKE_STEPS
    unheld = [step.get(UNHELD_PARAMETERS) for step in steps]
    apart = [step.reduction is not None and step.reduction.apart for step in steps]
    if MISTAKES[name].distributed:
        assert (set(unheld) <= {0.0, None}, apart) == (True, [True] * MISTAKE_STEPS)
    else:
        assert (unheld[9], set(apart)) == (2.0, {False})
        for ring in rings.values():
            named = dict(ring.schema.facts)["unheld_parameters"].split(", ")
            assert len(named) == 2 and all(LEFT_OUT in each for each in named)


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("steps twice", STEP_REPEATED),
        ("steps slices twice", STEP_REPEATED),
        ("never clears", GRADIENTS_ADD_UP),
        ("never clears slices", GRADIENTS_ADD_UP),
        ("clears between micro-batches", BACKWARDS_DISCARDED),
    ],
)
def test_mistakes_in_the_order_of_calls_are_seen(trained, name, column):
    for rank in range(2):
        ring = read_ring(trained / name / f"rank{rank}.ring", one_schema=False)
        made = {each: ring.column(each) for each in ORDER}
        assert all(value > 0.0 for value in made.pop(column)[5:])
        assert not any(value > 0.0 for values in made.values() for value in values)
        assert ring.state.probe_errors == 0
        assert ring.state.unsupported == ()


@pytest.mark.parametrize("name", VARIANTS)
def test_nothing_of_that_is_said_of_what_is_right(rings, name):
    for step in merge_rings(rings):
        assert step.get(UNHELD_PARAMETERS) in (0.0, None)
        assert step.reduction is None or not step.reduction.apart
        assert not any(step.flag(column) for column in ORDER)


def reference(trained: Path, variant: Variant) -> dict[str, np.ndarray]:
    """The gradient columns of each layer at step 1."""
    gradients = gradients_of(trained, variant)
    return {layer: row_of(gradient, 1.0) for layer, gradient in gradients.items()}


def gradients_of(trained: Path, variant: Variant) -> dict[str, torch.Tensor]:
    first, second = halves_of(trained, variant)
    return {layer: first[layer] + second[layer] for layer in first}


def halves_of(trained: Path, variant: Variant) -> list[dict[str, torch.Tensor]]:
    """What the first and the second half of the data add to the gradients of step 1."""
    kind = f"{variant.moe}-{variant.tied}-{variant.per_token}"
    found: list[dict[str, torch.Tensor]] = torch.load(trained / "reference" / f"{kind}.pt")
    return found


def strategy_of(variant: Variant) -> str:
    kinds = [kind for kind in ("tp", "pp", "cp", "ep") if getattr(variant, kind) > 1]
    if variant.instances > 1:
        kinds.append("dp")
    if variant.world > variant.tp * variant.pp:
        kinds.append("zero1" if variant.distributed else "layer_wise" if variant.dealt else "dp")
    return "+".join(sorted(kinds))


def data_ranks_of(variant: Variant, rank: int) -> str:
    """Ranks with data of their own: those of the same part of a stage."""
    stage = variant.world // variant.pp
    first = rank // stage * stage + rank % variant.tp
    ranks = range(first, rank // stage * stage + stage, variant.tp)
    return "" if len(ranks) == 1 else f"{ranks[0]}{'-' if variant.tp == 1 else ','}{ranks[-1]}"


def gradient_format_of(variant: Variant) -> str:
    return variant.dtype if variant.bare else "fp32"
