"""Which courses of amax a delayed scaling bears without an alert, and which it does not.

The state is Transformer Engine's by shape and by what it does, read by the probe's own functions;
layers are sampled every tenth step, far more often than by default.
"""

from collections.abc import Callable
from math import inf, nan
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from mp_agent.node.accounting.accumulator import Accumulator
from mp_agent.probe.instruments.fp8_operands import backward_row, backward_scale, forward_row
from mp_agent.records.columns import FP8
from tests.agent.node.accounting.fp8_account import add_sample, misscaled, named, new_account
from tests.agent.probe.instruments.fp8_scaled_layers import E4M3_MAX, E5M2_MAX, state, update
from tests.subtests import each

LAYERS, STEPS, INTERVAL = 20, 800, 10
JITTER = 0.3
"""Standard deviation of the logarithm of amax, from step to step."""
FORWARD, BACKWARD = 3, 2
"""Tensors of a layer in each direction, of which the last is not cast."""

Course = Callable[[int], float]
"""From a step to the factor of all amax."""


class Training:
    """Layers whose amax has its own size, jitters, and follows a course."""

    def __init__(self, *, history: int, algorithm: str, **thresholds: float) -> None:
        self.algorithm = algorithm
        self.random = torch.Generator().manual_seed(1)
        self.states = [state(LAYERS * tensors, history) for tensors in (FORWARD, BACKWARD)]
        # Activations and weights from 0.1 to 100, gradients from 1e-8 to 1e-3.
        self.sizes = [
            10.0 ** (self._uniform(FORWARD) * 3.0 - 1.0),
            10.0 ** (self._uniform(BACKWARD) * 5.0 - 8.0),
        ]
        self.modules = [self._module(place) for place in range(LAYERS)]
        self.account: Accumulator = new_account(**thresholds)
        self.alarms = 0

    def train(
        self,
        activations: Course,
        gradients: Course,
        *,
        updates: bool = True,
        steps: int = STEPS,
    ) -> "Training":
        for step in range(1, steps + 1):
            sampled = step % INTERVAL == 0
            forward, backward = self.states
            forward.amax_history[0] = self._amax(0, activations(step))
            rows = [[forward_row(module)] for module in self.modules] if sampled else []
            scales = [backward_scale(module) for module in self.modules] if sampled else []
            if updates:
                update(forward, E4M3_MAX, self.algorithm)
            backward.amax_history[0] = self._amax(1, gradients(step))
            if updates:
                update(backward, E5M2_MAX, self.algorithm)
            for module, scale, found in zip(self.modules, scales, rows, strict=False):
                assert scale is not None
                found.append(backward_row(module, scale))
            if sampled:
                self._add(step, rows)
        return self

    def _add(self, step: int, rows: list[list[torch.Tensor | None]]) -> None:
        """Add a sample; a layer's row is that of both passes."""
        found: dict[str, dict[str, float]] = {}
        for place, of_passes in enumerate(rows):
            tables = [
                dict(zip(FP8.names, row.tolist(), strict=True))
                for row in of_passes
                if row is not None
            ]
            known = [{name: x for name, x in table.items() if x == x} for table in tables]
            found[f"layer {place}"] = {
                name: (min if name.endswith("_min") else max)(t[name] for t in known if name in t)
                for name in {name for table in known for name in table}
            }
        add_sample(self.account, step, found)
        self.alarms += bool(misscaled(self.account))

    def _amax(self, direction: int, factor: float) -> torch.Tensor:
        size = self.sizes[direction]
        noise = torch.randn(size.shape, generator=self.random) * JITTER
        amax = size * noise.exp() * factor
        per_layer = (FORWARD, BACKWARD)[direction]
        amax[per_layer - 1 :: per_layer] = 0.0
        return amax

    def _uniform(self, tensors: int) -> torch.Tensor:
        return torch.rand(LAYERS * tensors, generator=self.random)

    def _module(self, place: int) -> nn.Module:
        """Return a module whose state is a view of that of all."""
        made: Any = nn.Module()
        made.fp8_meta = {
            key: _Slice(whole, slice(place * tensors, (place + 1) * tensors))
            for key, whole, tensors in (
                ("scaling_fwd", self.states[0], FORWARD),
                ("scaling_bwd", self.states[1], BACKWARD),
            )
        }
        module: nn.Module = made
        return module


class _Slice:
    def __init__(self, whole: SimpleNamespace, tensors: slice) -> None:
        self.scale = whole.scale[tensors]
        self.amax_history = whole.amax_history[:, tensors]


def jump(step: int) -> float:
    return 1000.0 if step >= 400 else 1.0


def spike(step: int) -> float:
    return 1000.0 if step == 400 else 1.0


def growth(step: int) -> float:
    return float(1.01 ** min(step, 600))


def decay(step: int) -> float:
    return float(max(0.99**step, 1e-3))


def late(step: int) -> float:
    return 0.0 if step <= 55 else 1.0


def not_finite(value: float) -> Course:
    return lambda step: value if step in (100, 101, 500) else 1.0


def same(step: int) -> float:
    return 1.0


HEALTHY: dict[str, tuple[Course, Course]] = {
    "steady": (same, same),
    "activations that grow by 1 % a step": (growth, same),
    "gradients that decay a thousandfold": (same, decay),
    "a jump to a thousand times": (jump, jump),
    "a spike of a thousand times, which a long history remembers": (spike, spike),
    "gradients of zero in the first steps": (same, late),
    "inputs of zero in the first steps": (late, same),
    "an amax of Inf": (not_finite(inf), not_finite(inf)),
    "an amax of NaN": (same, not_finite(nan)),
}
"""Courses of activations with weights, and of gradients."""


@pytest.mark.long
@each("course", HEALTHY)
@each(("history", "algorithm"), [(1024, "max"), (16, "recent")])
def test_what_delayed_scaling_is_designed_to_bear_brings_no_alert(course, history, algorithm):
    training = Training(history=history, algorithm=algorithm)
    training.train(*HEALTHY[course])
    assert training.alarms == 0
    assert misscaled(training.account) == 0.0


def test_a_limit_of_twice_the_range_would_be_exceeded_by_jitter_alone():
    """Where scales follow the latest amax; the limit that is shipped has to bear that."""
    training = Training(history=16, algorithm="recent", fp8_range_used_high=2.0)
    assert training.train(same, same).alarms > 0


def test_scales_that_stand_still_under_a_tensor_that_grows_are_found():
    training = Training(history=16, algorithm="max").train(same, same, steps=100)
    assert training.alarms == 0
    training.train(growth, same, updates=False, steps=400)
    assert {reason for _, reason in named(training.account)} == {"saturated"}
    assert misscaled(training.account) == LAYERS


def test_gradients_that_are_cast_with_the_first_scale_for_ever_are_found():
    training = Training(history=16, algorithm="max").train(same, same, updates=False, steps=30)
    assert {reason for _, reason in named(training.account)} == {"unused"}
    assert misscaled(training.account) == LAYERS
