"""From judged trainings to the numbers per signal: lead, recall, false alarms."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite
from statistics import median

from benchmarks.early_warning.judging import CONDITIONS, Verdict

WORSE = 1.05
"""A training went wrong whose last losses are above its twin's by this factor, or not finite."""
_LAST_STEPS = 20
LEFT = 1.1
"""A loss has left its course where it stays above its best, or its twin's, by this factor."""
_SMOOTHED_STEPS = 10


@dataclass(frozen=True, slots=True)
class Pair:
    """A training that is meant to go wrong, and the healthy one from the same seed."""

    cause: str
    seed: int
    faulty: Verdict
    healthy: Verdict
    faulty_loss: float
    healthy_loss: float
    left_step: int | None = None
    """The first step from which on the smoothed loss is out of its course, of `left_step`."""

    @property
    def went_wrong(self) -> bool:
        """Whether the loss says at the end that it did, or a condition of the loss."""
        worse = not self.faulty_loss <= WORSE * self.healthy_loss
        return worse or self.faulty.loss_step is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """How well one signal, or the first of any, announces the trainings that went wrong."""

    signal: str
    leads: tuple[int, ...]
    """Steps by which it fired before a condition of the loss; negative where it came after."""
    leads_to_loss: tuple[int, ...]
    """The same before the loss itself left its course."""
    alone: int
    """Trainings in which it fired and no condition of the loss did."""
    wrong: int
    """Trainings that went wrong."""
    false_alarms: int
    """Healthy trainings in which it fired."""
    false_critical: int
    """Those in which it was critical."""
    healthy: int

    @property
    def median_lead(self) -> float | None:
        """Median lead over the trainings in which it fired and a condition of the loss did."""
        return median(self.leads) if self.leads else None

    @property
    def median_lead_to_loss(self) -> float | None:
        """Median lead over the trainings in which it fired and the loss left its course."""
        return median(self.leads_to_loss) if self.leads_to_loss else None

    @property
    def warned(self) -> int:
        """Trainings in which it fired before any condition of the loss."""
        return sum(lead > 0 for lead in self.leads) + self.alone

    @property
    def recall(self) -> float | None:
        """`warned` as a share of the trainings that went wrong; None without one."""
        return self.warned / self.wrong if self.wrong else None


def last_loss(losses: Sequence[float]) -> float:
    """Return the median of the last losses; NaN when one of them is not finite."""
    last = losses[-_LAST_STEPS:]
    return median(last) if all(map(isfinite, last)) else float("nan")


def left_step(losses: Sequence[float], twin: Sequence[float]) -> int | None:
    """Return the first step from which on the loss stays 10 % above its best or its twin's.

    losses, twin: of each step, from 1 on. Both are smoothed by the median of ten steps, which must
    stay above to the end; a loss that is not finite is above. None where it comes back.
    """
    best, found = inf, None
    for step in range(_SMOOTHED_STEPS, len(losses) + 1):
        smoothed = _smoothed(losses, step)
        bound = LEFT * max(min(best, _smoothed(twin, step)), 0.0)
        above = not smoothed <= bound
        found = (step if found is None else found) if above else None
        best = min(best, smoothed) if isfinite(smoothed) else best
    return found


def _smoothed(losses: Sequence[float], step: int) -> float:
    window = losses[max(step - _SMOOTHED_STEPS, 0) : step]
    return median(window) if window and all(map(isfinite, window)) else inf


def reach_of(signal: str, pairs: Sequence[Pair]) -> Reach:
    """Return how well one signal warns; the name of a condition, also of the loss."""
    found = [pair.faulty.fired.get(signal) for pair in pairs if pair.went_wrong]
    fired = [signal in pair.healthy.fired for pair in pairs]
    critical = [signal in pair.healthy.critical for pair in pairs]
    return _reach(signal, found, fired, critical, pairs)


def any_signal(pairs: Sequence[Pair]) -> Reach:
    """Return how well the first signal of each training warns, whichever it is."""
    found = [pair.faulty.first_signal_step for pair in pairs if pair.went_wrong]
    fired = [pair.healthy.first_signal_step is not None for pair in pairs]
    critical = [bool(pair.healthy.critical) for pair in pairs]
    return _reach("the first of any", found, fired, critical, pairs)


def reaches(pairs: Sequence[Pair]) -> list[Reach]:
    """Return every condition that fired anywhere, in the catalog's order."""
    fired = {name for pair in pairs for name in (*pair.faulty.fired, *pair.healthy.fired)}
    return [reach_of(name, pairs) for name in CONDITIONS if name in fired]


def _reach(
    signal: str,
    found: Sequence[int | None],
    fired: Sequence[bool],
    critical: Sequence[bool],
    pairs: Sequence[Pair],
) -> Reach:
    wrong = [pair for pair in pairs if pair.went_wrong]
    both = [
        (pair.faulty.loss_step, step)
        for pair, step in zip(wrong, found, strict=True)
        if step is not None
    ]
    return Reach(
        signal=signal,
        leads=tuple(loss - step for loss, step in both if loss is not None),
        leads_to_loss=tuple(
            pair.left_step - step
            for pair, step in zip(wrong, found, strict=True)
            if step is not None and pair.left_step is not None
        ),
        alone=sum(loss is None for loss, _ in both),
        wrong=len(wrong),
        false_alarms=sum(fired),
        false_critical=sum(critical),
        healthy=len(pairs),
    )
