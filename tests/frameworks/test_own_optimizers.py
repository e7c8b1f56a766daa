"""fastai and Keras, whose optimizers are not torch's, in programs that never mention mp_agent."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

import pytest

from mp_agent.ring import locations
from tests.agent.probe.rings import RingContents, read_ring
from tests.frameworks import own_optimizers_job
from tests.frameworks.own_optimizers_job import BATCHES, CLIP, RATE
from tests.frameworks.torchrun import ROOT

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


def _run(directory: Path, variant: str, **environment: str) -> dict[str, Any]:
    file = directory / "seen.json"
    done = subprocess.run(
        [sys.executable, own_optimizers_job.__file__, variant, str(file)],
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT / '.editable'}:{ROOT}",
            "OMP_NUM_THREADS": "1",
            "KERAS_HOME": str(directory / "keras"),
            "FASTAI_HOME": str(directory / "fastai"),
            **environment,
        },
    )
    assert done.returncode == 0, done.stderr[-10_000:]
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def _train(directory: Path, variant: str) -> Trained:
    """Train with and without the probe, to the same weights bit for bit."""
    without = _run(directory, variant)
    environment = {"MP_AGENT_ATTACH": "1", "MP_AGENT_NODE_AGENT": "none"}
    seen = _run(directory, variant, **environment, MP_AGENT_DIR=str(directory / "shm"))
    assert seen == without
    (run,) = locations.find_runs(directory / "shm")
    (ring,) = locations.find_rings(run)
    return Trained(seen, read_ring(ring, one_schema=False))


def _pairs(values: list[float]) -> list[float]:
    return [sum(pair) / 2 for pair in zip(values[::2], values[1::2], strict=True)]


@pytest.mark.parametrize(
    "variant",
    [
        "fastai:",
        "fastai:clip",
        "fastai:lookahead",
        "fastai:wrapped clip fp16",
        "fastai:clip fp16",
        "keras:",
        "keras:global_clip",
        "keras:static global_clip",
        "keras:fp16",
        "keras:apply_gradients",
    ],
)
def test_loss_norm_rate_and_clipping_are_those_of_the_library(framework, tmp_path, variant):
    library, _, rest = variant.partition(":")
    framework(library)
    trained = _train(tmp_path, variant)
    steps = STEPS[library]
    assert len(trained.ring.records) == steps
    assert trained.norms == pytest.approx(trained.seen["norms"], rel=1e-5)
    assert trained.ring.column("loss") == pytest.approx(trained.seen["losses"], rel=1e-5)
    assert trained.ring.column("learning_rate") == pytest.approx([RATE] * steps)
    assert trained.ring.column("skipped") == [0.0] * steps
    assert trained.ring.state.unsupported == ()
    if "clip" in rest:
        assert trained.ring.column("clip_max_norm") == pytest.approx([CLIP] * steps)
        assert trained.ring.column("clip_norm") == pytest.approx(trained.norms, rel=1e-5)
    if "fp16" in rest:
        scaler = {"fastai": "GradScaler", "keras": "LossScaleOptimizer"}[library]
        precision = {"fastai": "bf16", "keras": "fp16"}[library]
        assert (trained.facts["scaler"], trained.facts["precision"]) == (scaler, precision)


@pytest.mark.parametrize("library", ["fastai", "keras"])
def test_micro_batches_are_one_step_of_their_mean(framework, tmp_path, library):
    framework(library)
    trained = _train(tmp_path, f"{library}:accumulate")
    assert trained.ring.column("loss") == pytest.approx(_pairs(trained.seen["losses"]), rel=1e-5)
    if library == "fastai":  # whose gradients are averaged where the callback sees them
        assert trained.norms == pytest.approx(trained.seen["norms"][1::2], rel=1e-5)
    assert len(trained.norms) == STEPS[library] // 2


def test_keras_averages_the_gradients_of_micro_batches(framework, tmp_path):
    """One batch twice has the gradients of the batch."""
    framework("keras")
    once, twice = tmp_path / "once", tmp_path / "twice"
    for each in (once, twice):
        each.mkdir()
    plain = _train(once, "keras:")
    accumulated = _train(twice, "keras:accumulate repeat")
    assert accumulated.norms[0] == pytest.approx(plain.norms[0], rel=1e-5)


@pytest.mark.parametrize("variant", ["fastai:fp16 skips", "keras:fp16 skips"])
def test_steps_that_a_scaler_skips_count_as_skipped(framework, tmp_path, variant):
    library = variant.partition(":")[0]
    framework(library)
    trained = _train(tmp_path, variant)
    skipped = trained.ring.column("skipped")
    assert len(skipped) == STEPS[library]
    assert skipped[0] == 1.0
    scales = trained.ring.column("loss_scale")
    assert [after < before for before, after in zip(scales, scales[1:], strict=False)] == [
        flag == 1.0 for flag in skipped[:-1]
    ]
    assert trained.ring.column("loss")[0] == pytest.approx(trained.seen["losses"][0], rel=1e-5)
    assert trained.ring.gradients(0)["nan_elements"] + trained.ring.gradients(0)["inf_elements"] > 0


def test_clipping_of_each_variable_alone_is_named(framework, tmp_path):
    framework("keras")
    trained = _train(tmp_path, "keras:clip")
    assert trained.norms == pytest.approx(trained.seen["norms"], rel=1e-5)
    assert any("clipnorm" in feature for feature in trained.ring.state.unsupported)


def test_layers_have_the_paths_of_keras_variables(framework, tmp_path):
    framework("keras")
    trained = _train(tmp_path, "keras:")
    assert [layer.name for layer in trained.ring.schema.layers] == [
        f"sequential.{layer}.{variable}"
        for layer in ("dense", "dense_1")
        for variable in ("kernel", "bias")
    ]


def test_a_step_that_keras_compiles_is_measured(framework, tmp_path):
    framework("keras")
    trained = _train(tmp_path, "keras:compiled global_clip")
    assert len(trained.ring.records) == STEPS["keras"]
    assert trained.norms == pytest.approx(trained.seen["norms"], rel=1e-5)
