"""fastai and Keras, whose optimizers are not torch's: the numbers are those of the library."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import sqrt
from pathlib import Path
from typing import Any

import pytest

from mp_agent.probe.hooks.libraries import CLIPPED_ALONE
from mp_agent.ring import locations
from tests.agent.probe.rings import RingContents, merge_rings, read_ring
from tests.frameworks import own_optimizers_job
from tests.frameworks.own_optimizers_job import BATCHES, CLIP, RATE
from tests.frameworks.torchrun import ROOT, WORLD, torchrun

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.e2e]

STEPS = {"fastai": 2 * BATCHES, "keras": BATCHES}


@dataclass
class Trained:
    seen: dict[str, Any]
    ring: RingContents

    @property
    def norms(self) -> list[float]:
        return [
            sqrt(self.ring.gradients(place)["sum_squares"])
            for place in range(len(self.ring.records))
        ]

    @property
    def facts(self) -> dict[str, str]:
        return dict(self.ring.schema.facts)


def _run(library: str, directory: Path, *variants: str, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, own_optimizers_job.__file__, library, str(directory), *variants],
        check=False,
        capture_output=True,
        text=True,
        timeout=1800,
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT / '.editable'}:{ROOT}",
            "OMP_NUM_THREADS": "1",
            "KERAS_HOME": str(directory),
            "FASTAI_HOME": str(directory),
            **environment,
        },
    )
    assert done.returncode == 0, done.stderr[-10_000:]


VARIANTS = {
    "fastai": (
        *("plain", "clip", "lookahead", "wrapped clip fp16", "clip fp16"),
        *("accumulate", "fp16 skips"),
    ),
    "keras": (
        *("plain", "global_clip", "static global_clip", "fp16", "apply_gradients"),
        *("accumulate", "accumulate repeat", "fp16 skips", "clip", "compiled global_clip"),
    ),
}


BOTH = pytest.mark.parametrize("library", list(VARIANTS))


@pytest.fixture(scope="module")
def trained(framework, tmp_path_factory) -> Callable[[str, str], Trained]:
    """Return what was seen of a variant of a library, all variants of which are trained at once."""

    @cache
    def train(library: str) -> Path:
        framework(library)
        directory: Path = tmp_path_factory.mktemp(library)
        _run(library, directory, *VARIANTS[library])
        return directory

    def read(library: str, variant: str) -> Trained:
        place = train(library) / variant
        seen = json.loads((place / "seen.json").read_text())
        return Trained(seen, read_ring(place / "rank0.ring", one_schema=False))

    return read


def _pairs(values: list[float]) -> list[float]:
    return [sum(pair) / 2 for pair in zip(values[::2], values[1::2], strict=True)]


MEASURED = [
    (library, variant)
    for library, variants in VARIANTS.items()
    for variant in variants
    if not any(word in variant for word in ("accumulate", "skips"))
]


@pytest.mark.parametrize(("library", "variant"), MEASURED)
def test_loss_norm_rate_and_clipping_are_those_of_the_library(trained, library, variant):
    found = trained(library, variant)
    steps = STEPS[library]
    assert found.seen["weights"] == found.seen["without"]
    assert len(found.ring.records) == steps
    assert found.norms == pytest.approx(found.seen["norms"], rel=1e-5)
    assert found.ring.column("loss") == pytest.approx(found.seen["losses"], rel=1e-5)
    assert found.ring.column("learning_rate") == pytest.approx([RATE] * steps)
    assert found.ring.column("skipped") == [0.0] * steps
    clips_each = (library, variant) == ("keras", "clip")
    assert found.ring.state.unsupported == ((CLIPPED_ALONE,) if clips_each else ())
    if "clip" in variant and not clips_each:
        assert found.ring.column("clip_max_norm") == pytest.approx([CLIP] * steps)
        assert found.ring.column("clip_norm") == pytest.approx(found.norms, rel=1e-5)
    if "fp16" in variant:
        scaler = {"fastai": "GradScaler", "keras": "LossScaleOptimizer"}[library]
        precision = {"fastai": "bf16", "keras": "fp16"}[library]
        assert (found.facts["scaler"], found.facts["precision"]) == (scaler, precision)


@BOTH
def test_micro_batches_are_one_step_of_their_mean(trained, library):
    found = trained(library, "accumulate")
    assert found.seen["weights"] == found.seen["without"]
    assert found.ring.column("loss") == pytest.approx(_pairs(found.seen["losses"]), rel=1e-5)
    assert len(found.norms) == STEPS[library] // 2
    if library == "fastai":  # whose gradients are averaged where the callback sees them
        assert found.norms == pytest.approx(found.seen["norms"], rel=1e-5)


def test_keras_averages_the_gradients_of_micro_batches(trained):
    """One batch twice has the gradients of the batch."""
    once, twice = trained("keras", "plain"), trained("keras", "accumulate repeat")
    assert twice.norms[0] == pytest.approx(once.norms[0], rel=1e-5)


@BOTH
def test_steps_that_a_scaler_skips_count_as_skipped(trained, library):
    found = trained(library, "fp16 skips")
    assert found.seen["weights"] == found.seen["without"]
    skipped, scales = found.ring.column("skipped"), found.ring.column("loss_scale")
    assert len(skipped) == STEPS[library]
    first = skipped.index(1.0)
    assert [after < before for before, after in pairwise(scales)] == [
        flag == 1.0 for flag in skipped[:-1]
    ]
    assert found.ring.column("loss") == pytest.approx(found.seen["losses"], rel=1e-5)
    gradients = found.ring.gradients(first)
    assert gradients["nan_elements"] + gradients["inf_elements"] > 0


def test_keras_under_ddp_has_the_loss_and_norm_of_all_ranks(framework, tmp_path):
    framework("keras")
    torchrun(
        "tests.frameworks.own_optimizers_job",
        "keras_ranks",
        str(tmp_path),
        "",
        KERAS_HOME=str(tmp_path),
    )
    seen = json.loads((tmp_path / "0" / "seen.json").read_text())
    assert seen["weights"] == seen["without"]
    rings = {rank: read_ring(tmp_path / str(rank) / f"rank{rank}.ring") for rank in range(WORLD)}
    steps = merge_rings(rings)
    assert [step.get("loss") for step in steps] == pytest.approx(seen["losses"], rel=1e-5)
    assert [step.grad_norm for step in steps] == pytest.approx(seen["norms"], rel=1e-5)
    assert [step.get("clip_max_norm") for step in steps] == pytest.approx([CLIP] * BATCHES)
    assert all(step.replicas["gradients"].agree for step in steps)
    assert steps[1].replicas["weights"].agree
    assert rings[0].state.unsupported == ()


def test_layers_have_the_paths_of_keras_variables(trained):
    assert {layer.name for layer in trained("keras", "plain").ring.schema.layers} == {
        f"sequential.{layer}.{variable}"
        for layer in ("dense", "dense_1")
        for variable in ("kernel", "bias")
    }


@BOTH
def test_a_program_that_never_mentions_mp_agent_is_watched_from_its_first_step(
    framework, tmp_path, library
):
    framework(library)
    environment = {"MP_AGENT_ATTACH": "1", "MP_AGENT_NODE_AGENT": "none"}
    _run(library, tmp_path, **environment, MP_AGENT_DIR=str(tmp_path / "shm"))
    seen = json.loads((tmp_path / "seen.json").read_text())
    (run,) = locations.find_runs(tmp_path / "shm")
    (ring,) = locations.find_rings(run)
    found = Trained(seen, read_ring(ring, one_schema=False))
    assert found.norms == pytest.approx(seen["norms"], rel=1e-5)
    assert found.ring.column("loss") == pytest.approx(seen["losses"], rel=1e-5)
    assert found.ring.state.unsupported == ()
