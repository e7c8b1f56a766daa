"""Keeps the cost of measuring within a share of the step time, on the host and on the device."""

from dataclasses import dataclass

WINDOW_STEPS = 100
"""Steps between two decisions. The first window, with its many layer samples, decides nothing."""
LAYER_FACTOR_AT_MOST = 16
STRIDE_AT_MOST = 64
_CALM_WINDOWS = 4
"""Windows in a row in which twice the cost would be within the budget, before more is measured."""
_CALM_SHARE = 0.8


@dataclass(slots=True)
class _Window:
    """Sums over the steps since the last decision, in seconds."""

    steps: int = 0
    step: float = 0.0
    host: float = 0.0
    device: float = 0.0


class OverheadBudget:
    """Decides by how much less is measured, from what measuring has cost.

    Beyond the budget it first stretches the interval of layer samples, then measures every n-th
    step alone. Both factors are powers of two: ranks that decide differently still have steps in
    common, those of the largest factor, without asking each other.

    layer_factor: by which the interval of layer samples is multiplied.
    stride: every so many steps gradients are measured.
    """

    def __init__(self, budget: float) -> None:
        """budget: share of the step time that measuring may take; 1 or more is no limit."""
        self.layer_factor = 1
        self.stride = 1
        self.host_ratio: float | None = None
        """Share of the step time that the probe's host time was in the last window."""
        self.device_ratio: float | None = None
        """The same of its device time; None without any."""
        self._budget = budget
        self._window = _Window()
        self._windows = 0
        self._calm_windows = 0

    def note_device_seconds(self, seconds: float) -> None:
        """Receive what measuring a step took on the device, which is known some steps later."""
        self._window.device += seconds

    def note_step(self, step_seconds: float, host_seconds: float) -> None:
        """Receive a step's time, and the probe's host time in it; decide when it is time to."""
        window = self._window
        if not step_seconds > 0.0:  # NaN for the first one
            return
        window.steps += 1
        window.step += step_seconds
        window.host += host_seconds
        if window.steps == WINDOW_STEPS:
            self._window = _Window()
            self._windows += 1
            self.host_ratio = window.host / window.step
            if window.device or self.device_ratio is not None:
                self.device_ratio = window.device / window.step
            if self._windows > 1 and self._budget < 1.0:
                self._decide(max(self.host_ratio, self.device_ratio or 0.0))

    def _decide(self, ratio: float) -> None:
        if ratio > self._budget:
            self._calm_windows = 0
            self._measure_less()
        elif 2 * ratio < _CALM_SHARE * self._budget:
            self._calm_windows += 1
            if self._calm_windows == _CALM_WINDOWS:
                self._calm_windows = 0
                self._measure_more()
        else:
            self._calm_windows = 0

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
