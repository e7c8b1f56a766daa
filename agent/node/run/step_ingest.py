"""Takes what an attempt yields into the account of its run: each item once, in order."""

from mp_agent.exporters.status_page.history import StepHistory
from mp_agent.node.accounting.accumulator import Accumulator
from mp_agent.node.cluster.member import MemberItem
from mp_agent.node.cluster.root import MergedTable
from mp_agent.node.collect.attempt import LocalStep
from mp_agent.records.merged import MergedStep

_JUDGEMENTS_KEPT = 4096


class StepIngest:
    """The one way into a run's account and its history."""

    def __init__(self, account: Accumulator, *, counted_sequence: int = 0) -> None:
        """counted_sequence: up to which an earlier node agent has counted this node's ranks."""
        self.account = account
        self.history = StepHistory()
        """The last steps, for the status page."""
        self.counted_sequence = counted_sequence
        """Steps up to this one are in the counts of the ranks of this node."""
        self._judged: dict[int, frozenset[str]] = {}
        """For the layers that come after a step: the optimizers whose norms counted in it."""

    def take(self, item: MemberItem) -> None:
        """Take in a step of this node's ranks, a step of the run, or the layers of one."""
        if isinstance(item, LocalStep):
            self._take_local(item)
        elif isinstance(item, MergedTable):
            self._take_table(item)
        else:
            self._take_step(item)

    def begin_attempt(self) -> None:
        """Begin to count the next attempt's steps from the first; counters go on."""
        self.account.begin_attempt()
        self.history.clear()
        self.counted_sequence = 0
        self._judged = {}

    def _take_local(self, step: LocalStep) -> None:
        """Count what the ranks said, unless an agent before this one has."""
        if step.row.sequence > self.counted_sequence:
            self.counted_sequence = step.row.sequence
            for rank, values in step.ranks.items():
                self.account.fold_rank(rank, values)

    def _take_step(self, step: MergedStep) -> None:
        self.account.fold_step(step)
        self.history.add(step)
        judged = {
            name
            for name, own in step.optimizers.items()
            if (step.gradients_judged if own.joint else own.judged)
        }
        self._judged[step.sequence] = frozenset(judged | ({""} if step.gradients_judged else set()))
        if len(self._judged) > _JUDGEMENTS_KEPT:
            del self._judged[next(iter(self._judged))]

    def _take_table(self, table: MergedTable) -> None:
        judged = self._judged.get(table.sequence, frozenset())
        layers = table.layers.judged_of(judged)
        self.account.fold_layers(table.sequence, layers, step_judged=bool(judged))
