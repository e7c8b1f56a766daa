"""The course of the steps: which one is under way, and when one is over."""

from collections.abc import Callable
from math import nan
from time import perf_counter

from mp_agent.probe.step import OpenStep


class Course:
    """The step under way and, where there are several optimizers, the one before it.

    A step ends when the first optimizer has stepped. It then waits for the other optimizers that
    stepped in the one before, so that what belongs to one iteration of the trainer stands in one
    record; at the latest until the first optimizer is looked at again.
    """

    def __init__(self, publish: Callable[[OpenStep], None]) -> None:
        self._publish = publish
        self.step = OpenStep(sequence=1, begun_seconds=nan)
        self._ended: OpenStep | None = None
        self._strangers = 0
        self._companions: set[str] = set()
        self._known: set[str] = set()

    def of(self, label: str) -> OpenStep:
        """Return the step to which gradients of the optimizer `label` belong now."""
        if label and self._ended is not None and label not in self._ended.stepped:
            return self._ended
        return self.step

    def gradients_change(self) -> None:
        """Note that a backward begins: what was measured so far is outdated."""
        self.step.measured.clear()
        if self._ended is not None:
            self._ended.measured.clear()

    def first_ended(self, strangers: int) -> None:
        """End the step under way.

        strangers: how many optimizers of the same model have yet to step; counts on the first
        step only.
        """
        self.settle()
        step = self.step
        self.step = OpenStep(sequence=step.sequence + 1, begun_seconds=perf_counter())
        self._strangers = strangers if step.sequence == 1 else 0
        self._ended = step
        self._settle_if_complete(step)

    def other_ended(self, label: str) -> None:
        """Note that another optimizer has stepped.

        The first one is the first of an iteration. So one that steps for the first time after the
        record of its iteration was published is followed from the next iteration on.
        """
        step = self.of(label)
        step.measured.discard(label)
        self.step.loss_of_another = self.step.losses > 0
        if step is self.step and step.sequence > 1 and label not in self._known:
            self._companions = {*self._companions, label}
        else:
            step.stepped.add(label)
        self._known.add(label)
        if step is self._ended:
            self._settle_if_complete(step)

    def settle(self) -> None:
        """Publish the step that has ended, whether or not others have followed."""
        if self._ended is not None:
            step, self._ended = self._ended, None
            self._companions = step.stepped
            self._publish(step)

    def _settle_if_complete(self, step: OpenStep) -> None:
        if self._companions <= step.stepped and len(step.stepped) >= self._strangers:
            self.settle()
