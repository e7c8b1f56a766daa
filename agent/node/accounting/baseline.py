"""Judges whether a run is like the good runs of its baseline: what is trained, and in which bands.

One place for live runs and records. Quantities of the run are compared by medians over windows of
steps, gradient norms of layers on the steps on which they are sampled.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mp_agent.node.accounting.tracker import AccountContext, LayerObservation, Tracker
from mp_agent.node.accounting.windows import median
from mp_agent.records.baseline import (
    ELEMENTS,
    GRAD_NORM,
    LAYER_GRAD_NORM,
    PARAMETER,
    QUANTITIES,
    WINDOWS_STEPS,
    Band,
    Baseline,
    BaselineDeparture,
)
from mp_agent.records.columns import GRADIENTS
from mp_agent.records.merged import MergedStep

_OUTSIDE_RUNNING = 2
"""Windows, or samples of a layer, that lie outside on one side before a run counts as unlike."""
FIRST_SAMPLES = 3
"""Within which a layer is sampled that is trained from the beginning: optimizers may take turns.
As many have to show a layer that no good run trained."""
_DEPARTURES_AT_MOST = 100
_FACT_STEPS = 2 * WINDOWS_STEPS[0]
_WHOLE = 0.75
"""Share of the steps of a window from which on its median counts."""


@dataclass(slots=True)
class _Outside:
    """How often in a row a quantity was outside, and on which side; where that began."""

    count: int = 0
    above: bool = False
    step: int = 0
    value: float = 0.0


@dataclass(slots=True, kw_only=True)
class BaselineTracker(Tracker):
    """Where the run first left its baseline. Plain data, stored in the ledger."""

    first_step: int | None = None
    steps: int = 0
    world_size: int = 1
    windows: dict[int, int] = field(default_factory=dict)
    """The present one, by the number of its steps."""
    values: dict[int, dict[str, list[tuple[int, float]]]] = field(default_factory=dict)
    """Of the present window, with their steps, by the number of its steps and quantity."""
    outside: dict[str, _Outside] = field(default_factory=dict)
    """By quantity, or quantity and layer."""
    samples: int = 0
    absent: dict[str, int] = field(default_factory=dict)
    """Layers that no sample has had, with the step of the first sample."""
    departures: list[BaselineDeparture] = field(default_factory=list)
    """Each quantity, and each of a layer, once."""

    def observe(self, step: MergedStep, context: AccountContext) -> None:
        """Account for a closed step."""
        if context.baseline is None:
            return
        self.first_step = step.step if self.first_step is None else self.first_step
        self.steps, self.world_size = self.steps + 1, step.world_size
        own = step_values(step)
        for steps in WINDOWS_STEPS:
            window = (step.step - 1) // steps
            if window != self.windows.get(steps):
                self.windows[steps], self.values[steps] = window, {}
            for quantity, value in own.items():
                self.values[steps].setdefault(quantity, []).append((step.step, value))
            if step.step % steps == 0:
                self._close_window(steps, context.baseline)

    def observe_layers(self, sample: LayerObservation, context: AccountContext) -> None:
        """Compare what is trained, and the gradient norms of the layers."""
        baseline = context.baseline
        if baseline is None or sample.layers.family is not GRADIENTS or not sample.layers.complete:
            return
        self._compare_census(sample, baseline)
        factor = baseline.noise_factor(self.world_size)
        for view in sample.views:
            norm = layer_norm(view.values) if view.judged else None
            band = baseline.layer_band(view.name, sample.step)
            if norm is not None and band is not None:
                self._compare(LAYER_GRAD_NORM, [(sample.step, norm)], band, factor, view.name)

    def view(
        self, context: AccountContext, facts: Mapping[str, str]
    ) -> tuple[BaselineDeparture, ...] | None:
        """Return the departures, those of the first step first; None without a baseline.

        facts: those of the run, which are compared once it has begun.
        """
        if context.baseline is None:
            return None
        found = list(self.departures)
        if self.steps >= _FACT_STEPS:
            found += [
                BaselineDeparture(
                    quantity=name, step=self.first_step or 0, value=value, expected=expected
                )
                for name, (value, expected) in context.baseline.other_facts(facts).items()
            ]
        return tuple(sorted(found, key=lambda one: one.step))

    def _close_window(self, steps: int, baseline: Baseline) -> None:
        for quantity, values in self.values[steps].items():
            band = baseline.band(quantity, steps, values[0][0])
            if band is not None and len(values) >= _WHOLE * steps:
                factor = baseline.noise_factor(self.world_size) if quantity == GRAD_NORM else 1.0
                self._compare(quantity, values, band, factor, window=steps)

    def _compare(
        self,
        quantity: str,
        values: list[tuple[int, float]],
        band: Band,
        factor: float,
        layer: str = "",
        window: int = 0,
    ) -> None:
        """Compare the median of values with a band; factor: widens it."""
        what = f"{quantity} {layer}" if layer else quantity
        name = f"{what} {window}" if window else what
        low, high = (
            (band.low / factor, band.high * factor) if factor > 1.0 else (band.low, band.high)
        )
        middle = median([value for _, value in values])
        if low <= middle <= high:
            self.outside.pop(name, None)
            return
        above = middle > high
        state = self.outside.get(name)
        if state is None or state.above is not above:
            beyond = (one for one in values if one[1] > high or one[1] < low)
            step, value = next(beyond, values[0])
            state = self.outside[name] = _Outside(0, above, step, value)
        state.count += 1
        if state.count == _OUTSIDE_RUNNING:
            expected = f"{low:.4g} to {high:.4g}"
            self._note(quantity, state.step, f"{state.value:.4g}", expected, layer)

    def _compare_census(self, sample: LayerObservation, baseline: Baseline) -> None:
        names = set(sample.layers.names)
        if names.isdisjoint(baseline.layers):
            return  # another wrapper, which has names of its own
        self.samples += 1
        if self.samples == 1:
            self.absent = dict.fromkeys(set(baseline.layers) - names, sample.step)
        self.absent = {name: step for name, step in self.absent.items() if name not in names}
        if self.samples == FIRST_SAMPLES:
            for layer, step in sorted(self.absent.items()):
                self._note(PARAMETER, step, "not trained", "trained", layer)
        for layer in names.difference(baseline.layers, baseline.other_layers):
            state = self.outside.setdefault(f"{PARAMETER} {layer}", _Outside(step=sample.step))
            state.count += 1
            if state.count == FIRST_SAMPLES:
                self._note(PARAMETER, state.step, "trained", "not trained", layer)
        for view in sample.views:
            known = baseline.layers.get(view.name)
            own = view.values.get("elements", 0.0)
            if known and own and view.judged and not self._same_elements(own, known, baseline):
                self._note(ELEMENTS, sample.step, f"{own:.0f}", f"{known:.0f}", view.name)

    def _same_elements(self, own: float, known: float, baseline: Baseline) -> bool:
        """Return whether a layer has as many elements, or each rank as many of its own."""
        return own == known or any(
            own * size == known * self.world_size for size in baseline.world_sizes
        )

    def _note(self, quantity: str, step: int, value: str, expected: str, layer: str = "") -> None:
        noted = any((one.quantity, one.layer) == (quantity, layer) for one in self.departures)
        if not noted and len(self.departures) < _DEPARTURES_AT_MOST:
            self.departures.append(
                BaselineDeparture(
                    quantity=quantity, step=step, value=value, expected=expected, layer=layer
                )
            )


def step_values(step: MergedStep) -> dict[str, float]:
    """Return what has bands of a step, as far as it was observed and counts."""
    found = {name: step.get(name) for name in QUANTITIES if name != GRAD_NORM}
    found[GRAD_NORM] = step.grad_norm if step.gradients_judged else None
    return {name: value for name, value in found.items() if value is not None}


def layer_norm(values: Mapping[str, float]) -> float | None:
    """Return the gradient norm of a layer; None where it had no gradient."""
    squares = values.get("sum_squares")
    return squares**0.5 if squares is not None and values.get("elements") else None
