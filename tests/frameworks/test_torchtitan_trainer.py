"""torchtitan's own trainer on two CPUs: its numbers are those that it logs."""

import json
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mp_agent.records.steps import OTHER_GRADIENTS
from tests.agent.probe.rings import (
    RingContents,
    merge_layer_tables,
    merge_rings,
    read_ring,
    rows_by_name,
)
from tests.frameworks.torchrun import torchrun
from tests.frameworks.torchtitan_variants import VARIANTS, WATCHING
from tests.subtests import each

pytest.importorskip("torchtitan.trainer", reason="torchtitan is not installed")

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.long]

RANKS = (0, 1)
LIMIT = 0.5
OF_FLOAT32 = 5e-4
"""Relative error of torchtitan's norm, which it sums in float32."""
WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    from tests.frameworks.torchtitan_job import make_assets

    directory: Path = tmp_path_factory.mktemp("torchtitan")
    make_assets(directory)
    torchrun("tests.frameworks.torchtitan_job", str(directory), *VARIANTS)
    return directory


def seen(directory: Path, name: str, watching: str) -> list[dict[str, Any]]:
    """What each rank wrote."""
    files = (directory / name / f"seen-{watching}-{rank}.json" for rank in RANKS)
    return [json.loads(file.read_text()) for file in files]


def rings_of(directory: Path, name: str, watching: str) -> dict[int, RingContents]:
    found = {}
    for rank in RANKS:
        (path,) = (directory / name).glob(f"{watching}-*/*/rank{rank}.ring")
        found[rank] = read_ring(path, one_schema=False)
    return found


@each("name", VARIANTS)
class TestEveryLayout:
    @pytest.mark.parametrize("watching", WATCHING[1:])
    def test_weights_and_log_are_those_without_the_probe(self, trained, name, watching):
        plain, watched = seen(trained, name, "none"), seen(trained, name, watching)
        assert watched == plain

    def test_steps_loss_tokens_and_norm_are_the_trainers_own(self, trained, name):
        rings, last = rings_of(trained, name, "watch"), RANKS[-1]
        lines = seen(trained, name, "watch")[last]["lines"]
        merged, tokens = merge_rings(rings), 0.0
        assert [step.sequence for step in merged] == [line["step"] for line in lines]
        for step, line in zip(merged, lines, strict=True):
            assert step.get("loss") == pytest.approx(line["loss"], rel=1e-6)
            assert step.gradients_complete
            squares = step.get("sum_squares")
            assert squares is not None
            assert sqrt(squares) == pytest.approx(line["norm"], rel=OF_FLOAT32)
            assert step.get("clip_max_norm") == LIMIT
            assert step.get("clip_norm") == pytest.approx(line["norm"])
            tokens += step.get("tokens") or 0.0
            assert tokens == line["tokens"]

    def test_layers_are_those_of_the_whole_model(self, trained, name):
        expected = {
            layer
            for rank in seen(trained, name, "watch")
            for layer in map(_without_wrappers, rank["layers"])
        }
        tables = merge_layer_tables(rings_of(trained, name, "watch"))
        found = rows_by_name(tables[max(tables)])
        # Of a second part of the model on a rank, the class is in front of the name.
        assert {each.removeprefix("Llama3Model.") for each in found} == expected

    def test_strategy_is_that_of_the_layout(self, trained, name):
        variant = VARIANTS[name]
        expected = "hsdp" if variant.replicate > 1 else "fsdp2+tp" if variant.tp > 1 else "fsdp2"
        for ring in rings_of(trained, name, "watch").values():
            assert dict(ring.schema.facts)["strategy"] == expected

    def test_nothing_is_unsupported_and_no_hook_fails(self, trained, name):
        for ring in rings_of(trained, name, "watch").values():
            assert ring.state.unsupported == ()
            assert ring.state.probe_errors == 0


def test_norm_is_that_in_float64(trained):
    ranks = seen(trained, "fsdp", "watch")
    merged = merge_rings(rings_of(trained, "fsdp", "watch"))
    for index, step in enumerate(merged):
        lines = [rank["lines"][index] for rank in ranks]
        coefficient = LIMIT / (lines[0]["norm"] + 1e-6)
        expected = sqrt(sum(line["clipped_squares"] for line in lines)) / coefficient
        squares = step.get("sum_squares")
        assert squares is not None
        assert np.sqrt(squares) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", [name for name, each in VARIANTS.items() if each.pp == 1])
def test_without_watch_a_loss_of_chunks_is_absent_and_named(trained, name):
    """A backward per chunk for the head, and one of their sum for the rest of the model."""
    for ring in rings_of(trained, name, "init").values():
        assert np.isnan(ring.column("loss")).all()
        assert OTHER_GRADIENTS in ring.state.unsupported


def _without_wrappers(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name
