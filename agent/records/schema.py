"""Describes a rank's rows: the rank, its layers, and the share of each tensor that it holds."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta, Struct

from mp_agent.records.columns import FAMILIES, ColumnFamily

Text = Annotated[str, Meta(max_length=4096)]

DATA_RANKS_FACT = "data_ranks"
"""Fact that names the ranks which train on data of their own, this one among them."""


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
    family: str = ""
    """The family of columns that alone has rows of it, where rows are not of parameters; families
    that have such shares have no rows of others."""
    home: str = ""
    """Ranks that hold the tensors, such as `0-3`; distinguishes tensors of equal name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One parameter: its name without wrapper prefixes, its share, its local element count."""

    name: str
    share: int
    """Index into `Schema.shares`."""
    elements: int


class FamilyColumns(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A family of columns as the rows of a ring or report have it: its name, its columns' names."""

    name: Text
    columns: tuple[Text, ...]


UNHELD, UNCHANGED, CUT_OFF = "unheld_parameters", "unchanged_parameters", "cut_off_parameters"
PARTED = "parted_parameters"
TRAINED_RATIO = "trained_ratio"
"""Facts that looks at parameters find: names of some, and the share of the model that is trained;
a fact that is not known, or of no parameter, is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """How to read the rows of a ring: column names, shares and layers, in the order of the rows.

    Layers are in module order (forward order, as `named_parameters()` yields them).
    """

    step_columns: tuple[str, ...]
    families: tuple[FamilyColumns, ...]
    shares: tuple[Share, ...]
    layers: tuple[Layer, ...]
    facts: tuple[tuple[str, str], ...] = ()
    """Static facts for the info metrics, by name:
    strategy, precision, scaler, measuring_point, device, gpu_uuid, autocast_format,
    parameter_format, master_format, gradient_format, matmul_format, fp8_library; and `script`, the
    path of the main script, where the job wants it checked; and `collections`, see
    `tensor_collections`; and `data_ranks`."""

    def columns(self, family: str) -> tuple[str, ...]:
        """Return the columns of a family; none if the rows have nothing of it."""
        return next((found.columns for found in self.families if found.name == family), ())

    @property
    def parameter_shares(self) -> int:
        """The number of shares of parameters, which come first."""
        return sum(not share.family for share in self.shares)

    @property
    def parameter_layers(self) -> int:
        """The number of layers that are parameters, which come first."""
        return sum(not self.shares[layer.share].family for layer in self.layers)

    def fact(self, name: str) -> str:
        """Return the fact called `name`; "" if the probe did not determine it."""
        return dict(self.facts).get(name, "")


def family_columns(families: Iterable[ColumnFamily] = FAMILIES) -> tuple[FamilyColumns, ...]:
    """Return the columns of some families, as a schema or report names them."""
    return tuple(FamilyColumns(family.name, family.names) for family in families)
