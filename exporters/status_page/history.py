"""The last steps of a run, complete, for curves."""

from collections import deque
from collections.abc import Mapping

from mp_agent.records.merged import MergedStep

STEPS_KEPT = 1000

_NAMES = (
    *("step", "time_unix_seconds", "loss", "loss_scale", "grad_norm", "skipped"),
    *("loss_nonfinite", "gradients_nonfinite"),
)
Point = tuple[int, float, float | None, float | None, float | None, bool, bool, bool]


class StepHistory:
    """Keeps loss, loss scale and gradient norm of the last `STEPS_KEPT` closed steps."""

    def __init__(self) -> None:
        self._points: deque[Point] = deque(maxlen=STEPS_KEPT)
        self.loss_misread = False
        """Whether the losses are known to be multiplied by a scale; they are omitted then."""

    def add(self, step: MergedStep) -> None:
        """Add a closed step. A norm that does not count (skipped, partial) is omitted.

        So is a loss that was NaN or Inf on a rank.
        """
        loss_nonfinite = step.flag("loss_nonfinite")
        self._points.append(
            (
                step.step,
                step.time_unix_seconds,
                None if loss_nonfinite else step.get("loss"),
                step.get("loss_scale"),
                step.grad_norm if step.gradients_judged else None,
                step.skipped,
                loss_nonfinite,
                step.gradient_nonfinite_elements > 0,
            )
        )

    def clear(self) -> None:
        """Remove all steps: a new attempt starts its own count."""
        self._points.clear()

    def columns(self, *, after_step: int | None = None) -> Mapping[str, list[object]]:
        """Return the steps as columns of equal length, oldest first; None for "not observed"."""
        points = [p for p in self._points if after_step is None or p[0] > after_step]
        columns: dict[str, list[object]] = {
            name: [point[at] for point in points] for at, name in enumerate(_NAMES)
        }
        if self.loss_misread:
            columns["loss"] = [None] * len(points)
        return columns
