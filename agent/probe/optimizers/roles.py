"""Which of the watched optimizers train the run's model, as their backwards and steps show."""

from itertools import count

from torch.optim import Optimizer

from mp_agent.probe.optimizers.watched import Role, WatchedOptimizer

IDLE_STEPS_AT_MOST = 100
"""After which an optimizer that never steps no longer counts."""


class OptimizerRoles:
    """The watched optimizers in the order in which they came, and the passes that they step in.

    A pass begins with a backward of the run. A candidate becomes joint once it has stepped in the
    same pass as the run, and separate once it has stepped in a pass of its own.
    """

    def __init__(self) -> None:
        self.watched: list[WatchedOptimizer] = []
        self._pass = 1
        """Numbers the backwards."""

    @property
    def first(self) -> WatchedOptimizer | None:
        """The optimizer whose steps are the run's."""
        return next((watched for watched in self.watched if watched.role is Role.FIRST), None)

    @property
    def labels_of_run(self) -> set[str]:
        """Labels of the optimizers whose gradients are the run's."""
        return {watched.label for watched in self.of_run}

    @property
    def awaited(self) -> set[str]:
        """The labels of those that became candidates in the step under way."""
        return {
            watched.label
            for watched in self.watched
            if watched.role is Role.CANDIDATE and not watched.idle_steps
        }

    @property
    def of_run(self) -> list[WatchedOptimizer]:
        """The optimizers whose gradients are the run's."""
        return [watched for watched in self.watched if watched.role is not Role.SEPARATE]

    def begin_pass(self) -> bool:
        """Begin the next pass; return whether a candidate turned out to be separate.

        That is one that has stepped by itself in the pass that is over.
        """
        alone = [
            watched
            for watched in self.watched
            if watched.role is Role.CANDIDATE and watched.stepped_in_pass == self._pass
        ]
        if alone and any(each.of_run and each.stepped_in_pass for each in self.watched):
            for watched in alone:
                watched.become(Role.SEPARATE)
        else:
            alone = []
        self._pass += 1
        return bool(alone)

    def confirm(self, watched: WatchedOptimizer) -> None:
        """Make a candidate joint if the run has stepped by the same backward."""
        if watched.role is Role.CANDIDATE and any(
            each.of_run and each.stepped_in_pass == self._pass for each in self.watched
        ):
            watched.become(Role.JOINT)

    def stepped(self, watched: WatchedOptimizer) -> None:
        """Record that an optimizer has stepped."""
        watched.stepped_in_pass = self._pass
        if not watched.of_run:
            return
        for other in self.watched:
            if other.stepped_in_pass == self._pass:
                self.confirm(other)
            elif other.role is Role.CANDIDATE:
                other.idle_steps += 1
        self.watched = [
            each
            for each in self.watched
            if each.role is not Role.CANDIDATE or each.idle_steps <= IDLE_STEPS_AT_MOST
        ]

    def has_new_gradients(self, watched: WatchedOptimizer) -> bool:
        """Return whether there was a backward since an optimizer stepped last."""
        return self._pass > 1 and watched.stepped_in_pass != self._pass

    def is_outer(self, optimizer: Optimizer, watched: WatchedOptimizer) -> bool:
        """Return whether `optimizer` steps after `watched`'s own without a backward in between.

        It holds the same parameters, and what it steps with is no gradient of a loss (the outer
        optimizer of DiLoCo).
        """
        return self.has_just_stepped(watched) and watched.alive and not watched.is_of(optimizer)

    def has_just_stepped(self, watched: WatchedOptimizer) -> bool:
        """Return whether there was no backward since an optimizer stepped last."""
        return watched.stepped_in_pass == self._pass and self._pass > 1

    def free_label(self) -> str:
        """Return the lowest number that no other optimizer is called by."""
        taken = {watched.label for watched in self.watched}
        return next(label for label in map(str, count(1)) if label not in taken)

    def replace_first(self, watched: WatchedOptimizer) -> None:
        """Make another one the first, which is gone: one that is joint with it, if there is."""
        self.drop_gone()
        joint = [each for each in self.watched if each.joint]
        successor = watched if watched.joint or not joint else joint[0]
        successor.become(Role.FIRST)

    def drop_gone(self) -> None:
        """Stop watching optimizers that no longer exist."""
        self.watched = [watched for watched in self.watched if watched.alive]
