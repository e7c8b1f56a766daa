"""The wall between the probe and training: what fails in the probe stays in the probe."""

import logging
from collections import Counter
from collections.abc import Callable
from time import perf_counter
from typing import ParamSpec, TypeVar

import torch

log = logging.getLogger("mp_agent")

FAILURES_AT_MOST = 10

P = ParamSpec("P")
F = TypeVar("F", bound=Callable[..., None])


def _never_traced(function: F) -> F:
    disable: Callable[[F], F] = torch.compiler.disable
    return disable(function)


class Guard:
    """Runs the probe's own code inside training's calls.

    Nothing that it runs raises, runs again from within itself, or runs while a CUDA graph is being
    captured. Each kind of failure is logged once; after `FAILURES_AT_MOST` failures of one kind
    the guard closes for good: the probe has detached itself.
    """

    def __init__(
        self, *, on_failure: Callable[[], None], on_capture: Callable[[], None] = lambda: None
    ) -> None:
        self.closed = False
        self._on_failure = on_failure
        self._on_capture = on_capture
        self._busy = False
        self._failures: Counter[str] = Counter()
        self._seconds = 0.0
        self._since_seconds = 0.0
        self._later: list[Callable[[], None]] = []

    def later(self, function: Callable[[], None]) -> None:
        """Have `function` called once the present call has returned, on the same thread.

        It is code of the user's, so it is neither guarded nor timed, and its own steps are watched.
        """
        self._later.append(function)

    @_never_traced
    def run(
        self, kind: str, function: Callable[P, None], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Call `function`; a failure is logged under `kind`, counted and swallowed."""
        if self.closed or self._busy:
            return
        self._busy = True
        self._since_seconds = perf_counter()
        try:
            if _capturing_cuda_graph():
                self._on_capture()
            else:
                function(*args, **kwargs)
        except Exception:
            self._note_failure(kind)
        finally:
            self._seconds += perf_counter() - self._since_seconds
            self._busy = False
        while self._later:
            self._later.pop(0)()

    def take_seconds(self) -> float:
        """Return the host time spent since this was last asked, up to now. Called from within."""
        now_seconds = perf_counter()
        seconds = self._seconds + now_seconds - self._since_seconds
        self._seconds, self._since_seconds = 0.0, now_seconds
        return seconds

    def _note_failure(self, kind: str) -> None:
        """Log and count what is being handled. Counting may itself fail; that is let go."""
        self._failures[kind] += 1
        if self._failures[kind] == 1:
            log.warning("the probe failed in %s; training goes on", kind, exc_info=True)
        if self._failures[kind] == FAILURES_AT_MOST:
            self.closed = True
            log.warning("the probe detached itself: %s failed %d times", kind, FAILURES_AT_MOST)
        try:
            self._on_failure()
        except Exception:
            log.debug("a failure of the probe could not be counted", exc_info=True)


def _capturing_cuda_graph() -> bool:
    initialized: Callable[[], bool] = torch.cuda.is_initialized
    return initialized() and torch.cuda.is_current_stream_capturing()
