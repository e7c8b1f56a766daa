"""When layers are measured, so that measuring keeps within its share of the step time."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, isfinite, isnan, log2, sqrt

import numpy as np
import torch

from mp_agent.records.columns import GRADIENT_POSITIONS
from mp_agent.records.steps import FloatArray

WINDOW_STEPS = 100
"""Steps between two decisions. The first window, with its many layer samples, decides nothing."""
LAYER_FACTOR_AT_MOST = 16
STRIDE_AT_MOST = 64
_WINDOWS_AT_MOST = 32
"""That are judged together. A sample of layers rarer than that costs next to nothing per step."""
_CALM_WINDOWS = 4
"""Windows in which twice the cost would be within the budget, before more is measured."""
_CALM_SHARE = 0.8


@dataclass(slots=True)
class _Window:
    """Sums over some steps, in seconds."""

    steps: int = 0
    step: float = 0.0
    host: float = 0.0
    device: float = 0.0
    plain_step: float = 0.0
    """Of the steps without a sample of layers."""
    plain_host: float = 0.0

    @property
    def ratio(self) -> float:
        return max(self.host, self.device) / self.step

    @property
    def plain_ratio(self) -> float:
        return self.plain_host / self.plain_step if self.plain_step else 0.0


class OverheadBudget:
    """Decides by how much less is measured, from what measuring has cost.

    Beyond the budget it first stretches the interval of layer samples, then measures every n-th
    step alone. Both factors are powers of two: ranks that decide differently still have steps in
    common, those of the largest factor, without asking each other.

    A window without a sample of layers says nothing of their cost, and one with a sample says too
    much: windows are judged together that span an interval of the samples. Where two in a row are
    beyond the budget each, the rest is not waited for: one of them has no sample. Where the steps
    without a sample alone are beyond it in two windows in a row, rarer samples cannot help: both
    factors become at once what brings the host's time back.

    layer_factor: by which the interval of layer samples is multiplied.
    stride: every so many steps gradients are measured.
    """

    def __init__(self, budget: float, layer_interval_steps: int = WINDOW_STEPS) -> None:
        """budget: share of the step time that measuring may take; 1 or more is no limit."""
        self.layer_factor = 1
        self.stride = 1
        self.host_ratio: float | None = None
        """Share of the step time that the probe's host time was in the windows judged last."""
        self.device_ratio: float | None = None
        """The same of its device time; None without any."""
        self._budget = budget
        self._layer_interval_steps = layer_interval_steps
        self._window = _Window()
        self._windows: deque[_Window] = deque(maxlen=_WINDOWS_AT_MOST)
        """Those since the last change."""
        self._begun = False

    def note_device_seconds(self, seconds: float) -> None:
        """Receive what measuring a step took on the device, which is known some steps later."""
        self._window.device += seconds

    def note_step(
        self, step_seconds: float, host_seconds: float, *, with_layers: bool = False
    ) -> None:
        """Receive a step's time, and the probe's host time in it; decide when it is time to.

        with_layers: its layers were measured.
        """
        window = self._window
        if not step_seconds > 0.0:  # NaN for the first one
            return
        window.steps += 1
        window.step += step_seconds
        window.host += host_seconds
        if not with_layers:
            window.plain_step += step_seconds
            window.plain_host += host_seconds
        if window.steps == WINDOW_STEPS:
            self._window = _Window()
            self._windows.append(window)
            self._note_ratios()
            if not self._begun:
                self._begun = True
                self._windows.clear()
            elif self._budget < 1.0:
                self._decide()

    def _note_ratios(self) -> None:
        judged = self._last(self._windows_per_sample)
        self.host_ratio = judged.host / judged.step
        if judged.device or self.device_ratio is not None:
            self.device_ratio = judged.device / judged.step

    def _decide(self) -> None:
        calm_windows = max(_CALM_WINDOWS, self._windows_per_sample)
        if (excess := self._excess_of_plain_steps()) > 1.0:
            self.layer_factor = LAYER_FACTOR_AT_MOST
            self.stride = min(self.stride * 2 ** ceil(log2(excess)), STRIDE_AT_MOST)
        elif self._is_beyond():
            self._measure_less()
        elif len(self._windows) < calm_windows:
            return
        elif 2 * self._last(calm_windows).ratio < _CALM_SHARE * self._budget:
            self._measure_more()
        else:
            return
        self._windows.clear()

    def _excess_of_plain_steps(self) -> float:
        """Return by what factor steps without layers exceed the budget in the last two windows."""
        if len(self._windows) < 2:
            return 0.0
        return min(window.plain_ratio for window in list(self._windows)[-2:]) / self._budget

    def _is_beyond(self) -> bool:
        windows = self._windows_per_sample
        if len(self._windows) == 1 and self._windows[0].plain_ratio > self._budget:
            return False  # the next one shows whether it is so without samples, too
        if len(self._windows) >= windows:
            return self._last(windows).ratio > self._budget
        last_two = list(self._windows)[-2:]
        return len(last_two) == 2 and min(each.ratio for each in last_two) > self._budget

    @property
    def _windows_per_sample(self) -> int:
        steps = self._layer_interval_steps * self.layer_factor
        return min(-(-steps // WINDOW_STEPS), _WINDOWS_AT_MOST)

    def _last(self, windows: int) -> _Window:
        """Return so many windows as one, or as many as there are."""
        found = list(self._windows)[-windows:]
        return _Window(
            steps=sum(each.steps for each in found),
            step=sum(each.step for each in found),
            host=sum(each.host for each in found),
            device=sum(each.device for each in found),
        )

    def _measure_less(self) -> None:
        if self.layer_factor < LAYER_FACTOR_AT_MOST:
            self.layer_factor *= 2
        elif self.stride < STRIDE_AT_MOST:
            self.stride *= 2

    def _measure_more(self) -> None:
        if self.stride > 1:
            self.stride //= 2
        elif self.layer_factor > 1:
            self.layer_factor //= 2


DENSE_INTERVAL_STEPS = 5
DENSE_SAMPLES = 10
PAUSE_STEPS = 10 * DENSE_INTERVAL_STEPS * DENSE_SAMPLES
"""Between the beginnings of two stretches: trouble that lasts costs `DENSE_SAMPLES` in as many."""


class DenseSampling:
    """Ten samples, one every five steps, after a step that went wrong.

    Ranks do not ask each other. They agree since a stretch follows from the number of the step that
    went wrong alone, not from when a rank learns of it, which on a device is some steps later: it
    begins at the first multiple of five that is at least five steps after that one. Ranks that
    take another step for the first to go wrong, at most four apart, mostly begin together, and
    have all samples but the first and the last in common otherwise.
    """

    def __init__(self) -> None:
        self._begin = -PAUSE_STEPS
        self._end = -PAUSE_STEPS
        self._settled = 0
        """The newest step of which it was said, when the stretch began, whether it is due."""
        self._asked = 0

    def note_trouble(self, sequence: int) -> None:
        """Begin a stretch because of step `sequence`, unless the last one began a short time ago.

        Nothing changes about a step that `due` was asked about.
        """
        intervals = -(-sequence // DENSE_INTERVAL_STEPS) + 1
        begin = intervals * DENSE_INTERVAL_STEPS
        if begin < self._begin + PAUSE_STEPS:
            return
        self._begin = begin
        self._end = begin + (DENSE_SAMPLES - 1) * DENSE_INTERVAL_STEPS
        self._settled = self._asked

    def due(self, sequence: int, factor: int) -> bool:
        """Return whether step `sequence` is one of a stretch.

        factor: by which the interval is multiplied, to stay within the overhead budget.
        """
        self._asked = max(self._asked, sequence)
        within = self._begin <= sequence <= self._end and sequence > self._settled
        return within and sequence % (DENSE_INTERVAL_STEPS * factor) == 0

    def lasts(self, sequence: int) -> bool:
        """Return whether step `sequence` lies within a stretch, from its first sample to its last.

        Nothing changes about a step that was asked about, as for `due`.
        """
        self._asked = max(self._asked, sequence)
        return self._begin <= sequence <= self._end and sequence > self._settled


_FEW_INTERVAL = 32
_EARLY_STEPS = 100
_EARLY_INTERVAL = 10
_TROUBLE_STEPS_IN_A_ROW = 3
_DENSE_ANYWAY_STEPS = _EARLY_STEPS - 3 * _EARLY_INTERVAL
"""Trouble until then has three early samples or more after it."""

_ZERO_SHARES_KEPT = 32
_ZERO_SHARE_RISE = 0.01

_SUM_SQUARES = GRADIENT_POSITIONS["sum_squares"]
_ZEROS_OF_ELEMENTS = (GRADIENT_POSITIONS["zero_elements"], GRADIENT_POSITIONS["elements"])
_NONFINITE = tuple(GRADIENT_POSITIONS[name] for name in ("nan_elements", "inf_elements"))


class _ZeroShares:
    """Notices that more of the gradients' elements are 0, or gone, than on any step of late.

    A layer that no longer gets a gradient raises that share by its own.
    """

    def __init__(self) -> None:
        self._shares: deque[float] = deque(maxlen=_ZERO_SHARES_KEPT)
        self._most: deque[float] = deque(maxlen=_ZERO_SHARES_KEPT)
        """Elements on those steps."""

    def rise_on(self, totals_GC: FloatArray) -> bool:
        """Return whether the share rises with this step beyond its own variation, and by 1 %."""
        zeros, elements = map(float, np.nansum(totals_GC[:, _ZEROS_OF_ELEMENTS], axis=0))
        if not elements:
            return False
        self._most.append(elements)
        most = max(self._most)
        share, shares = (zeros + most - elements) / most, self._shares
        known = len(shares) == _ZERO_SHARES_KEPT
        high, low = (max(shares), min(shares)) if known else (1.0, 1.0)
        shares.append(share)
        return share > high + max(high - low, _ZERO_SHARE_RISE)


class LayerSchedule:
    """Decides per step whether its layers are measured: on schedule, on trouble, and after it.

    Lasting trouble is measured `_TROUBLE_STEPS_IN_A_ROW` times and then every 10 steps, so
    that a run that is lost anyway does not pay twice on every step. After steps whose gradients
    are not finite, or more often zero than before, or that a scaler or the guard skipped, the
    schedule itself is denser (`DenseSampling`).
    """

    def __init__(
        self,
        interval_steps: int,
        thresholds: Mapping[str, float],
        budget: OverheadBudget | None = None,
    ) -> None:
        """budget: stretches the intervals; None is no limit."""
        self.budget = OverheadBudget(1.0) if budget is None else budget
        self._interval_steps = interval_steps
        self._norm_limit = thresholds["grad_norm_high"]
        self._trouble_in_a_row: dict[str, int] = {}
        self._after_trouble = DenseSampling()
        self._zero_shares = _ZeroShares()

    def due(self, sequence: int) -> bool:
        """Return whether step `sequence` is one of those that are always measured."""
        early = sequence <= _EARLY_STEPS and sequence % _EARLY_INTERVAL == 0
        factor = self.budget.layer_factor
        dense = self._after_trouble.due(sequence, factor)
        return sequence == 1 or early or dense or sequence % (self._interval_steps * factor) == 0

    def compares(self, sequence: int) -> bool:
        """Return whether what ranks hold is compared before the update of step `sequence`.

        Of the second step, so that what the first one did wrong is found at once.
        """
        return sequence == 2 or self.due(sequence)

    def compares_few(self, sequence: int) -> int | None:
        """Return the number of the look at a few weights on step `sequence`, None without one.

        It finds within `_FEW_INTERVAL` steps what parts whole models. Ranks that have other
        intervals, to stay within the overhead budget, number the looks alike.
        """
        due = sequence % (_FEW_INTERVAL * self.budget.layer_factor) == 0
        return sequence // _FEW_INTERVAL if due and not self.compares(sequence) else None

    def note_step(
        self, sequence: int, scalars: Mapping[str, float], totals_GC: FloatArray | None
    ) -> None:
        """Receive what a step, complete and on the host, turned out to be.

        scalars: step columns by name. totals_GC: [G, C], None where no gradients were measured.

        What the ranks know alike counts: replicas have the same gradients, and a norm that
        clipping computed and the flags of a skipped step, by a scaler or by the guard, are of all
        shards. The norm of a rank's own shards is not, nor is its own loss; of zeros each shard of
        a layer has its part.
        """
        troubled = (
            scalars.get("skipped", 0.0) > 0.0
            or scalars.get("guard_skip_update", 0.0) > 0.0
            or not isfinite(scalars.get("clip_norm", 0.0))
            or (totals_GC is not None and bool((totals_GC[:, _NONFINITE] > 0.0).any()))
        )
        if not troubled and totals_GC is not None:
            troubled = self._zero_shares.rise_on(totals_GC)
        if troubled and sequence > _DENSE_ANYWAY_STEPS:
            self._after_trouble.note_trouble(sequence)

    def follows_trouble(self, sequence: int) -> bool:
        """Return whether step `sequence` lies within a denser stretch of the schedule."""
        return self._after_trouble.lasts(sequence)

    @property
    def interval_steps(self) -> int:
        """Steps between two measurements of all layers, after the early ones."""
        return self._interval_steps * self.budget.layer_factor

    def due_after(self, sequence: int) -> bool:
        """Return whether what is seen only in a forward pass is measured in the step after this.

        On schedule, on the first step for which the model is known, and after trouble.
        """
        troubled = any(_is_looked_into(steps) for steps in self._trouble_in_a_row.values() if steps)
        return sequence == 1 or self.due(sequence + 1) or troubled

    def measures(self, sequence: int) -> bool:
        """Return whether gradients are measured on step `sequence` at all."""
        return sequence % self.budget.stride == 0 or self.due(sequence)

    def wanted_for_trouble(
        self, totals_GC: torch.Tensor, label: str = "", *, norm_is_known: bool = True
    ) -> bool:
        """Return whether these totals [G, C] (on the CPU) call for measuring the layers.

        Call once per step and optimizer, which `label` names, in order: it remembers for how long
        there has been trouble. norm_is_known: False while the totals are still scaled.
        """
        if not self._is_trouble(totals_GC, norm_is_known):
            self._trouble_in_a_row[label] = 0
            return False
        in_a_row = self._trouble_in_a_row[label] = self._trouble_in_a_row.get(label, 0) + 1
        return _is_looked_into(in_a_row)

    def _is_trouble(self, totals_GC: torch.Tensor, norm_is_known: bool) -> bool:
        measured = [row for row in totals_GC.tolist() if not isnan(row[_SUM_SQUARES])]
        nonfinite = any(row[column] > 0 for row in measured for column in _NONFINITE)
        if nonfinite or not norm_is_known:
            return nonfinite
        return sqrt(sum(row[_SUM_SQUARES] for row in measured)) > self._norm_limit


def _is_looked_into(steps_in_a_row: int) -> bool:
    """Return whether the layers are measured after so many steps of trouble."""
    if steps_in_a_row <= 0:
        return False
    return steps_in_a_row <= _TROUBLE_STEPS_IN_A_ROW or steps_in_a_row % _EARLY_INTERVAL == 0
