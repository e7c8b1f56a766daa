"""Samples more densely for a while after trouble, on the same steps on all ranks."""

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
        return self.lasts(sequence) and sequence % (DENSE_INTERVAL_STEPS * factor) == 0

    def lasts(self, sequence: int) -> bool:
        """Return whether step `sequence` lies within a stretch, from its first sample to its last.

        Nothing changes about a step that was asked about, as for `due`.
        """
        self._asked = max(self._asked, sequence)
        return self._begin <= sequence <= self._end and sequence > self._settled
