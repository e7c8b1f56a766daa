"""A flight record: the last steps of a run's ranks, kept because of an event."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mp_agent.records.conditions import ActiveCondition, StoredConditionEvent
from mp_agent.records.schema import RankIdentity, Schema
from mp_agent.records.steps import EndReason, LayerTable, RankState, StepRecord

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,150}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightRequest:
    """Requests the same steps, under one name, of all nodes of a run. Small, to be sent.

    Steps are sequence numbers; `first` may be below 1.
    """

    name: str
    """Name of the record's directory on every node: a UTC timestamp and the reason."""
    reason: str
    """Name of a condition, how the run ended, or `request`."""
    first: int
    last: int
    requested_unix_seconds: float
    trigger: StoredConditionEvent | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or ".." in self.name:
            raise ValueError(f"name of a flight record is {self.name!r}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segment:
    """Rows that a rank wrote under one schema, ascending."""

    schema: Schema
    steps: tuple[StepRecord, ...] = ()
    tables: tuple[LayerTable, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankLog:
    """One rank: its identity, its state, and what it wrote. Segments are in order."""

    identity: RankIdentity
    state: RankState
    end: EndReason
    """RUNNING if it was alive; KILLED if its process ended without an end marker."""
    segments: tuple[Segment, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NodeRecord:
    """The part of a flight record that one node wrote."""

    request: FlightRequest
    run: str
    node_rank: int
    host: str
    written_unix_seconds: float
    versions: Mapping[str, str]
    """Versions of mp_agent, python, numpy and torch."""
    settings: Mapping[str, Any]
    """Settings of the node agent, without secrets."""
    thresholds: Mapping[str, float]
    conditions: tuple[ActiveCondition, ...] = ()
    """Active when the record was requested, as far as this node knew."""
    ranks: tuple[RankLog, ...] = ()
    left_out: int = 0
    """Steps and layer tables dropped to stay within the byte limit."""
