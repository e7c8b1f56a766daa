"""Which step is under way, what belongs to it, and when it is complete."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from math import nan
from time import perf_counter

from mp_agent.probe.optimizers.watched import Role, WatchedOptimizer
from mp_agent.probe.step.open_step import OpenStep

ALONE_AT_MOST = 16
"""Steps of another optimizer in a row, and four times as many as it ever made in a row before, by
which it becomes the run's own."""


class StepBoundaries:
    """The step under way and, where there are several optimizers, the one before it.

    A step ends when the first optimizer, or one that is joint with it, has stepped. It then waits
    for the other optimizers that stepped in the one before, so that what belongs to one iteration
    of the trainer stands in one record; at the latest until the run is measured again. The methods
    that end a step return the steps that are complete by that, in order, for publishing.
    """

    def __init__(self) -> None:
        self.step = OpenStep(sequence=1, begun_seconds=nan)
        self._ended: OpenStep | None = None
        """Has ended and is yet to be published."""
        self._last: OpenStep | None = None
        """Has ended, published or not; joint optimizers may still step by the same backward."""
        self._same_pass = False
        self._awaited: Collection[str] = ()
        self._companions: set[str] = set()
        self._known: set[str] = set()
        self._alone: dict[str, int] = {}
        """Steps of other optimizers since the run's last, by label."""
        self._longest: dict[str, int] = {}
        self.reaches_run = False
        """A backward since the run's last step has made gradients of the run."""
        self._first_sequence = 1
        """Of the first step since another optimizer took over."""
        self._longest_turn = 0
        """Steps that an optimizer made in the place of one that then came back."""
        self._in_turns = False
        self._pass = 0
        """Numbers the backwards."""
        self._lone: dict[str, tuple[int, OpenStep]] = {}
        """By label: what would be a step, if that optimizer were the run's own; and its pass."""

    def of(self, watched: WatchedOptimizer) -> OpenStep:
        """Return the step to which gradients of an optimizer belong now."""
        label, last = watched.label, self._last
        joins = watched.role is not Role.SEPARATE and self._same_pass
        if joins and last is not None and label not in last.stepped:
            return last
        if not watched.of_run and self._ended is not None and label not in self._ended.stepped:
            return self._ended
        return self.step

    def is_published(self, step: OpenStep) -> bool:
        """Return whether nothing can be added to a step."""
        return step is not self.step and step is not self._ended

    def begin_pass(self) -> None:
        """Begin the next pass: a backward of the run starts."""
        self._pass += 1
        self._same_pass = False
        self.step.clipped.clear()

    def gradients_change(self, labels: Collection[str] | None = None) -> None:
        """Mark what was measured so far as outdated: a backward starts.

        labels: of the optimizers whose gradients it can reach, if not all.
        """
        for step in (self.step, self._ended):
            if step is not None:
                step.measured.difference_update(step.measured if labels is None else labels)

    def run_ended(self, label: str, awaited: Collection[str]) -> list[OpenStep]:
        """End the step under way: an optimizer of the run has stepped.

        awaited: other optimizers of the same model that have yet to step.
        """
        complete = self.close_ended()
        step = self.step
        step.stepped.add(label)
        self.step = OpenStep(sequence=step.sequence + 1, begun_seconds=perf_counter())
        self._awaited = awaited
        self.reaches_run = False
        self._ended = self._last = step
        self._same_pass = True
        for other, count in self._alone.items():
            self._longest[other] = max(count, self._longest.get(other, 0))
        self._alone.clear()
        self._lone.clear()
        return complete + self._close_if_complete(step)

    def joint_ended(self, label: str) -> list[OpenStep]:
        """Record the step of another optimizer of the run by the same backward."""
        if (step := self._last) is not None:
            step.measured.discard(label)
            step.settled.discard(label)
            step.stepped.add(label)
            if step is self._ended:
                return self._close_if_complete(step)
        return []

    def other_ended(self, watched: WatchedOptimizer) -> list[OpenStep]:
        """Record the step of an optimizer that is not the run's.

        The first one is the first of an iteration. So one that steps for the first time after the
        record of its iteration was published is followed from the next iteration on. If the run
        has made steps without it before, it may be its successor.
        """
        label, step = watched.label, self.of(watched)
        step.measured.discard(label)
        step.settled.discard(label)
        if step is self.step:
            self._alone[label] = self._alone.get(label, 0) + 1
            if step.sequence > 2 and label not in self._known:
                self._lone[label] = self._pass, _as_own(step, watched)
        self.step.loss_outdated = self.step.losses > 0
        if step is self.step and step.sequence > 1 and label not in self._known:
            self._companions = {*self._companions, label}
        else:
            step.stepped.add(label)
        self._known.add(label)
        if step is self._ended and watched.role is Role.SEPARATE:
            return self._close_if_complete(step)
        return []

    def is_overtaken_by(self, label: str, trains_the_model: Callable[[], bool]) -> bool:
        """Return whether another optimizer trains on where those of the run have ceased to.

        One that the run has stepped without is known for that at its second step in a row, unless
        another model is trained through the run's (the actor of an actor and critic), or optimizers
        were found to take turns. trains_the_model: whether it holds parameters of the run's model.
        """
        alone = self._alone.get(label, 0)
        limit = max(ALONE_AT_MOST, 4 * self._longest.get(label, 0), 4 * self._longest_turn)
        if alone >= limit:
            return True
        succeeds = label in self._lone and not self._in_turns
        return succeeds and (not self.reaches_run or trains_the_model())

    def note_turn(self) -> None:
        """Record that the optimizer that was overtaken steps again: it had no successor."""
        self._in_turns = True
        turn = self.step.sequence - self._first_sequence
        self._longest_turn = max(turn, self._longest_turn)

    def has_lone_step(self, label: str) -> bool:
        """Return whether an optimizer made a step of its own that counts if it takes over."""
        return label in self._lone

    def restart_with(self, label: str, labels: Mapping[str, str]) -> list[OpenStep]:
        """Make the step under way one of the optimizer that was `label` and is now the first.

        labels: the new ones of all that train its model, by those that they had. A step of its own
        before that one, if it has made one, is the last of those returned.
        """
        complete = self.close_ended()
        lone = self._lone_step(label, labels)
        if lone is not None:
            self.step.sequence += 1
            self.step.begun_seconds = perf_counter()
        self.step.totals.clear()
        self.step.rows.clear()
        self.step.measured.clear()
        self._first_sequence = self.step.sequence - (lone is not None)
        self._last, self._awaited = None, ()
        self.reaches_run = False
        for kept in (self._companions, self._known, self._alone, self._longest):
            kept.clear()
        self._lone.clear()
        return complete if lone is None else [*complete, lone]

    def _lone_step(self, label: str, labels: Mapping[str, str]) -> OpenStep | None:
        """Return the step that `label` made, with the parts of those that made it together."""
        if label not in self._lone:
            return None
        own_pass, step = self._lone.pop(label)
        for other, (in_pass, part) in self._lone.items():
            if in_pass == own_pass and other in labels:
                new = labels[other]
                step.stepped.add(new)
                if "" in part.totals:
                    step.totals[new] = part.totals[""]
                if "" in part.rows:
                    step.rows[new] = part.rows[""]
        return step

    def close_ended(self) -> list[OpenStep]:
        """Close the step that has ended, if any, whether or not other optimizers have followed."""
        if self._ended is None:
            return []
        step, self._ended = self._ended, None
        self._companions = step.stepped
        return [step]

    def _close_if_complete(self, step: OpenStep) -> list[OpenStep]:
        if self._companions <= step.stepped and step.stepped.issuperset(self._awaited):
            return self.close_ended()
        return []


def _as_own(step: OpenStep, watched: WatchedOptimizer) -> OpenStep:
    """Return what an optimizer did in a step as if it were the first one."""
    label, scalars = watched.label, {**step.scalars, "skipped": 0.0, **watched.scalars}
    scalars["step_seconds"] = perf_counter() - step.begun_seconds
    return replace(
        step,
        scalars=scalars,
        totals={"": step.totals[label]} if label in step.totals else {},
        rows={"": step.rows[label]} if label in step.rows else {},
        measured=set(),
        settled=set(),
        stepped={""},
        clipped=set(),
    )
