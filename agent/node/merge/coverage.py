"""Which tensors a run has, how they are split, and which of them are whole in a merge."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from mp_agent.records.columns import GRADIENTS
from mp_agent.records.merged import FIRST
from mp_agent.records.reports.rows import NodeShare

DIGEST_STEPS = 3
"""Steps on which assumed replicas must agree bit for bit before they count as replicas."""

GroupKey = tuple[str, str]
"""Group and optimizer: rows of the same key are of the same tensors."""


def group_key(share: NodeShare) -> GroupKey:
    """Return the key under which a share's rows enter a merge."""
    return (share.group, share.optimizer)


def assumed_name(key: GroupKey) -> str:
    """Return the name under which the verdict on an assumed group is kept."""
    group, optimizer = key
    return f"{group} of optimizer {optimizer}" if optimizer else group


@dataclass(frozen=True, slots=True)
class ExpectedShares:
    """What all ranks of a run hold, whether or not they are present in a given step."""

    groups: frozenset[GroupKey]
    """Of parameters."""
    strangers_hold_replicas: bool
    """Whether ranks that are not known can hold nothing but replicas of known shards."""
    joint: frozenset[str] = frozenset()
    """The other optimizers that train the model of the first one."""
    own: Mapping[str, frozenset[GroupKey]] = field(default_factory=dict)
    """The groups of families whose rows are not of parameters."""

    @property
    def of_run(self) -> frozenset[str]:
        """The optimizers whose gradients together are the run's."""
        return self.joint | {""}

    def name_of(self, optimizer: str) -> str | None:
        """Return the name of an optimizer next to the run; None where it is not shown."""
        return optimizer or (FIRST if self.joint else None)

    def complete(
        self,
        whole: Collection[GroupKey],
        optimizers: Collection[str] = ("",),
        family: str = GRADIENTS.name,
    ) -> bool:
        """Return whether the groups that are whole are all of a family that `optimizers` step."""
        groups = {key for key in self.own.get(family, self.groups) if key[1] in optimizers}
        return bool(groups) and groups <= set(whole) and self.strangers_hold_replicas


def make_expected_shares(
    shares: Iterable[NodeShare], *, ranks_known: int, world_size: int
) -> ExpectedShares:
    """Return the roster of the shares that `ranks_known` ranks hold."""
    shares = set(shares)
    parameters = [share for share in shares if not share.family]
    families = {share.family for share in shares if share.family}
    return ExpectedShares(
        groups=frozenset(map(group_key, parameters)),
        own={
            family: frozenset(group_key(share) for share in shares if share.family == family)
            for family in families
        },
        strangers_hold_replicas=ranks_known >= world_size
        or all(share.shard_count * share.replica_count >= world_size for share in shares),
        joint=frozenset(share.optimizer for share in shares if share.joint),
    )


class AssumedShares:
    """Judges the shares of plain parameters that no wrapper explains.

    Rows that are bitwise equal on all ranks at the first steps are replicas; rows that once
    differ belong to models of their own and add up. Either verdict stays.
    """

    def __init__(self, verdicts: Mapping[str, bool] | None = None) -> None:
        self.verdicts = dict(verdicts or {})
        """Final verdicts: group → whether its ranks are independent."""
        self._agreed_steps: dict[str, int] = {}

    def observe(self, group: str, *, ranks: int, distinct_rows: int) -> None:
        """Take in how many ranks delivered a row of one step, and how many of those differ."""
        if group in self.verdicts or ranks < 2:
            return
        if distinct_rows > 1:
            self.verdicts[group] = True
            return
        self._agreed_steps[group] = self._agreed_steps.get(group, 0) + 1
        if self._agreed_steps[group] >= DIGEST_STEPS:
            self.verdicts[group] = False

    def independent(self, group: str) -> bool:
        """Return whether each rank holds tensors of its own under this group's name."""
        return self.verdicts.get(group, False)

    def replicated(self, group: str) -> bool:
        """Return whether the ranks are known to hold the same tensors."""
        return self.verdicts.get(group) is False
