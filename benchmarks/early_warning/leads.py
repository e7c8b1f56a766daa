"""From judged trainings to the numbers per signal: lead, recall, false alarms."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from statistics import median

from benchmarks.early_warning.judging import CONDITIONS, LOSS_BASED, Verdict

LEFT = 1.1
"""A loss has left its course where it stays above its best, or its twin's, by this factor."""
DOUBLED = 2.0
SMOOTHED_STEPS = 10
CRITICAL_WITHIN_STEPS = 30
"""Steps within which a loss that has doubled is to be critical."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A training that is meant to go wrong, and the healthy one from the same seed."""

    cause: str
    seed: int
    twin: str
    """Name of the healthy training, which several causes may share."""
    faulty: Verdict
    healthy: Verdict
    left_step: int | None
    """The first step from which on the smoothed loss is out of its course, of `left_step`."""
    doubled_step: int | None = None
    """The first step from which on it is twice its best, as the probe sees the loss."""
    twin_left_step: int | None = None
    """The first step from which on the twin stays above its own best."""
    steps: int
    faulty_loss: float
    healthy_loss: float
    """The smoothed losses at the end."""

    def signals(self) -> dict[str, int]:
        """Return the conditions that distinguish the training from its twin, with their steps."""
        fired = self.faulty.fired
        return {name: step for name, step in fired.items() if name not in self.healthy.fired}

    def first_signal(self) -> tuple[str, int] | None:
        """Return the first of them that is of anything but the loss; None without one."""
        found = [(name, step) for name, step in self.signals().items() if name not in LOSS_BASED]
        return min(found, key=lambda item: item[1], default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """How well one signal, or the first of any, announces the trainings that went wrong."""

    signal: str
    leads: tuple[int, ...]
    """Steps by which it fired before the loss left its course; negative where it came after."""
    leads_to_condition: tuple[int, ...]
    """The same before a condition of the loss."""
    unmoved: int
    """Trainings in which it fired, whose loss did not leave its course."""
    wrong: int
    """Trainings that went wrong: their loss left its course."""
    false_alarms: int
    """Healthy trainings in which it fired."""
    false_critical: int
    """Those in which it was critical."""
    healthy: int

    @property
    def median_lead(self) -> float | None:
        """Median lead over the trainings that went wrong and in which it fired."""
        return median(self.leads) if self.leads else None

    @property
    def warned(self) -> int:
        """Trainings in which it fired before the loss left its course."""
        return sum(lead > 0 for lead in self.leads)

    @property
    def recall(self) -> float | None:
        """Share of the trainings that went wrong in which it fired at all; None without one."""
        return len(self.leads) / self.wrong if self.wrong else None

    @property
    def only_late(self) -> bool:
        """Whether it is an effect: it fired, and never before the loss left its course."""
        return bool(self.leads) and not self.warned


def left_step(losses: Sequence[float], twin: Sequence[float]) -> int | None:
    """Return the first step from which on the loss stays 10 % above its best or its twin's.

    losses, twin: of each step, from 1 on, above 0. Both are smoothed by the median of ten steps,
    which must stay above to the end; a loss that is not finite is above. None where it comes back.
    """
    return _stays_above(losses, lambda step, best: LEFT * min(best, smoothed(twin, step)))


def doubled_step(losses: Sequence[float]) -> int | None:
    """Return the first step from which on the smoothed loss stays at twice its best, or above."""
    return _stays_above(losses, lambda step, best: DOUBLED * best if best > 0.0 else inf)


def smoothed(losses: Sequence[float], step: int) -> float:
    """Return the median of the ten losses up to a step, of the first ones fewer.

    Infinite where one of them is not finite.
    """
    window = losses[max(step - SMOOTHED_STEPS, 0) : step]
    return median(window) if window and all(map(isfinite, window)) else inf


def _stays_above(losses: Sequence[float], bound: Callable[[int, float], float]) -> int | None:
    """Return the first step from which on the smoothed loss is above a bound to the end.

    bound: of a step and of the best smoothed loss before it.
    """
    best, found = inf, None
    for step in range(1, len(losses) + 1):
        level = smoothed(losses, step)
        above = level == inf or level > bound(step, best)
        found = (step if found is None else found) if above else None
        best = min(best, level)
    return found


def reach_of(signal: str, pairs: Sequence[Pair]) -> Reach:
    """Return how well one signal warns; the name of a condition, also of the loss."""
    return _reach(signal, pairs, [pair.signals().get(signal) for pair in pairs], {signal})


def any_signal(pairs: Sequence[Pair]) -> Reach:
    """Return how well the first signal of each training warns, whichever it is."""
    firsts = [pair.first_signal() for pair in pairs]
    steps = [None if first is None else first[1] for first in firsts]
    return _reach("the first of any", pairs, steps, set(CONDITIONS))


def reaches(pairs: Sequence[Pair]) -> list[Reach]:
    """Return every condition, in the catalog's order."""
    return [reach_of(name, pairs) for name in CONDITIONS]


def twins_of(pairs: Iterable[Pair]) -> list[Pair]:
    """Return a pair for each of the healthy trainings."""
    return list({(pair.twin, pair.seed): pair for pair in pairs}.values())


def critical_delays(pairs: Iterable[Pair]) -> list[int | None]:
    """Return, of trainings whose loss doubled, by how many steps a critical condition came later.

    None where there was none in time; trainings that ended before that are left out.
    """
    found: list[int | None] = []
    for pair in pairs:
        step, doubled = pair.faulty.critical_step, pair.doubled_step
        if doubled is None:
            continue
        if step is not None:
            found.append(step - doubled)
        elif pair.steps - doubled >= CRITICAL_WITHIN_STEPS:
            found.append(None)
    return found


def _reach(signal: str, pairs: Sequence[Pair], steps: Sequence[int | None], of: set[str]) -> Reach:
    fired = [(pair, step) for pair, step in zip(pairs, steps, strict=True) if step is not None]
    twins = twins_of(pairs)
    return Reach(
        signal=signal,
        leads=tuple(pair.left_step - step for pair, step in fired if pair.left_step is not None),
        leads_to_condition=tuple(
            pair.faulty.loss_step - step
            for pair, step in fired
            if pair.left_step is not None and pair.faulty.loss_step is not None
        ),
        unmoved=sum(pair.left_step is None for pair, _ in fired),
        wrong=sum(pair.left_step is not None for pair in pairs),
        false_alarms=sum(bool(of & twin.healthy.fired.keys()) for twin in twins),
        false_critical=sum(bool(of & twin.healthy.critical.keys()) for twin in twins),
        healthy=len(twins),
    )
