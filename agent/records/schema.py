"""Describes a rank's rows: the rank, its layers, and the share of each tensor that it holds."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RankIdentity:
    """Which process of which run a ring belongs to. Written once, when the ring is made."""

    run: str
    attempt: int
    """Restart count under torchrun, else 0."""
    launch: str
    """Identifies the ranks that a launcher started together; an elastic one restarts its ranks, at
    the same restart count, when nodes join or leave."""
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    host: str
    pid: int
    created_unix_ns: int
    torch_version: str
    version: str
    """Version of mp_agent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A set of tensors of which this rank holds the same shard and replica.

    Rows with equal `group` and `shard_index` on several ranks are replicas: the merge takes one.
    Rows with equal `group` and different `shard_index` add up; fewer than `shard_count` present
    means partial coverage. Plain parameters under a world size > 1 with no known wrapper have
    `assumed=True` and are judged by their digests: bitwise equal at the first steps means
    replicated, else independent.
    """

    group: str
    shard_index: int = 0
    shard_count: int = 1
    replica_index: int = 0
    replica_count: int = 1
    assumed: bool = False
    optimizer: str = ""
    """Empty for the optimizer that stepped first; others are "1", "2", … as they came."""
    joint: bool = False
    """Another optimizer's, of the model that the first one trains: it counts in the run's norm."""
    home: str = ""
    """Ranks that hold the tensors, such as `0-3`; distinguishes tensors of equal name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One parameter: its name without wrapper prefixes, its share, its local element count."""

    name: str
    share: int
    """Index into `Schema.shares`."""
    elements: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """How to read the rows of a ring: column names, shares and layers, in the order of the rows.

    Layers stand in module order (forward order, as `named_parameters()` yields them).
    """

    step_columns: tuple[str, ...]
    gradient_columns: tuple[str, ...]
    shares: tuple[Share, ...]
    layers: tuple[Layer, ...]
    facts: tuple[tuple[str, str], ...] = ()
    """Static facts for the info metrics, by name:
    strategy, precision, scaler, measuring_point, device, gpu_uuid."""

    def fact(self, name: str) -> str:
        """Return the fact called `name`; "" if the probe did not determine it."""
        return dict(self.facts).get(name, "")
