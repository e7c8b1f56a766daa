"""A run's account on disk, so that a successor of a killed node agent loses no count.

Counters and the sequence number up to which they count are committed in one atomic replacement;
the successor reads later steps from the rings, which hold more than a restart takes.
"""

import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from mp_agent.errors import RingError
from mp_agent.node.accounting.accumulator import Cells, Total
from mp_agent.node.accounting.progress import Progress
from mp_agent.node.run.launches import Launch
from mp_agent.node.series.layer_budget import LayerBudgetState
from mp_agent.records.conditions import ConditionMemory
from mp_agent.ring.files import open_private, replace_atomically

log = logging.getLogger("mp_agent.node")

FORMAT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeTotals:
    """Counts of the probes of ended attempts, and of what the node agent itself lost."""

    probe_seconds: float = 0.0
    probe_errors: int = 0
    setting_errors: int = 0
    records_dropped: int = 0
    series_dropped: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Everything about a run that is not in its rings."""

    # Otherwise infinity becomes null, and the whole ledger cannot be read.
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(ser_json_inf_nan="constants")

    format: int = FORMAT
    launches: tuple[Launch, ...] = ()
    """The launches of the current attempt."""
    newest_unix_ns: int = 0
    """When the newest ring of those launches was created; older launches are over."""
    begun_unix_ns: int = 0
    """When the first ring of the run was created and its counters began at 0. 0: not known."""
    attempts: int = 0
    """How often the run was started on this node."""
    read_launches: tuple[Launch, ...] = ()
    """Launches of earlier attempts whose rings were read completely."""
    session: str = ""
    """Identifies the attempt of this node to the root."""
    retired_sessions: tuple[str, ...] = ()
    """Sessions of all nodes in earlier attempts, the latest last."""
    closed_sequence: int = 0
    closed_layers_sequence: int = 0
    """Steps and layer tables up to these are in the root's account; at the root, in this ledger."""
    counted_sequence: int = 0
    """Steps up to this one are in the counters of this node's ranks."""
    progress: Progress = field(default_factory=Progress)
    totals: list[Total] = field(default_factory=list)
    histograms: list[Cells] = field(default_factory=list)
    layer_budget: LayerBudgetState = field(default_factory=LayerBudgetState)
    assumed: dict[str, list[list[int]]] = field(default_factory=dict)
    """Sets of ranks that hold copies of a group, by group that no wrapper explains."""
    conflicts: dict[str, int] = field(default_factory=dict)
    """By ring of jobs of the same name, the step up to which records are counted as lost."""
    agent: ProbeTotals = field(default_factory=ProbeTotals)
    conditions: ConditionMemory = field(default_factory=ConditionMemory)


@dataclass(frozen=True, slots=True)
class _Format:
    format: int = FORMAT


_BYTES_MAX = 1 << 30
_ADAPTER = TypeAdapter(Ledger)
_FORMATS = TypeAdapter(_Format)
"""Reads the format alone: of another one, nothing else may fit."""


def read_ledger(path: Path) -> Ledger:
    """Return the ledger at `path`; an empty one if there is none or it cannot be used."""
    try:
        # Anything but a regular file might block, or never end.
        with os.fdopen(open_private(path), "rb") as file:
            if os.fstat(file.fileno()).st_size > _BYTES_MAX:
                raise RingError(f"it holds more than {_BYTES_MAX} bytes")
            content = file.read()
        found = _FORMATS.validate_json(content).format
        if found != FORMAT:
            log.warning("ledger %s has format %d, counters start at 0", path, found)
            return Ledger()
        return _ADAPTER.validate_json(content)
    except FileNotFoundError:
        return Ledger()
    except (OSError, RingError, ValidationError) as error:
        log.warning("ledger %s cannot be used, counters start at 0: %s", path, error)
        return Ledger()


def write_ledger(path: Path, ledger: Ledger) -> None:
    """Replace the ledger at `path` atomically. Raises OSError, for example if the disk is full."""
    replace_atomically(path, _ADAPTER.dump_json(ledger))
