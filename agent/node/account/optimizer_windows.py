"""Extremes of the gradient norm per optimizer, where a run has several."""

from collections.abc import Mapping, Sequence

from mp_agent.node.account.window import Bucket, ValueWindow
from mp_agent.records.merged import MergedStep


class OptimizerWindows:
    """One window per optimizer that the ranks hold, by its name."""

    def __init__(
        self, window_seconds: float, buckets: Mapping[str, Sequence[Bucket]] | None = None
    ) -> None:
        self._window_seconds = window_seconds
        self._windows = {
            name: ValueWindow(window_seconds, list(own)) for name, own in (buckets or {}).items()
        }

    @property
    def buckets(self) -> dict[str, list[Bucket]]:
        """Return what the constructor takes."""
        return {name: window.buckets for name, window in self._windows.items()}

    def fold(self, step: MergedStep) -> None:
        """Add the norms of a closed step that count; forget optimizers that are held no more."""
        for name in self._windows.keys() - step.optimizers_held:
            del self._windows[name]
        for name, own in step.optimizers.items():
            if own.judged and (norm := own.grad_norm) is not None:
                window = self._windows.setdefault(name, ValueWindow(self._window_seconds))
                window.add(norm, step.time_unix_seconds)

    def extremes(self, time_unix_seconds: float) -> dict[str, tuple[float, float]]:
        """Return (largest, smallest) norm over the window that ends now, per optimizer."""
        found = {name: window.extremes(time_unix_seconds) for name, window in self._windows.items()}
        return {name: extremes for name, extremes in found.items() if extremes is not None}

    def clear(self) -> None:
        """Forget all values."""
        self._windows.clear()
