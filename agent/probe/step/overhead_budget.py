"""Keeps the cost of measuring within a share of the step time, on the host and on the device."""

from collections import deque
from dataclasses import dataclass

WINDOW_STEPS = 100
"""Steps between two decisions. The first window, with its many layer samples, decides nothing."""
LAYER_FACTOR_AT_MOST = 16
STRIDE_AT_MOST = 64
_WINDOWS_AT_MOST = 32
"""That are judged together. A sample of layers rarer than that costs next to nothing per step."""
_CALM_WINDOWS = 4
"""In which twice the cost would be within the budget, before more is measured."""
_CALM_SHARE = 0.8


@dataclass(slots=True)
class _Window:
    """Sums over some steps, in seconds."""

    steps: int = 0
    step: float = 0.0
    host: float = 0.0
    device: float = 0.0

    @property
    def ratio(self) -> float:
        return max(self.host, self.device) / self.step


class OverheadBudget:
    """Decides by how much less is measured, from what measuring has cost.

    Beyond the budget it first stretches the interval of layer samples, then measures every n-th
    step alone. Both factors are powers of two: ranks that decide differently still have steps in
    common, those of the largest factor, without asking each other.

    A window without a sample of layers says nothing of their cost, and one with a sample says too
    much: windows are judged together that span an interval of the samples. Where two in a row are
    beyond the budget each, the rest is not waited for: one of them has no sample.

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
        if self._is_beyond():
            self._measure_less()
        elif len(self._windows) < calm_windows:
            return
        elif 2 * self._last(calm_windows).ratio < _CALM_SHARE * self._budget:
            self._measure_more()
        else:
            return
        self._windows.clear()

    def _is_beyond(self) -> bool:
        windows = self._windows_per_sample
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
