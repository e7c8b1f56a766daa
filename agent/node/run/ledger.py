"""A run's account on disk, so that a node agent that dies is replaced without losing a count.

Counts and the sequence number up to which they go are committed in one atomic replacement; the
successor reads the steps after it from the rings, whose history is longer than any restart.
"""

import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from mp_agent.errors import RingError
from mp_agent.node.accounting.accumulator import Progress
from mp_agent.node.accounting.counters import Cells, Total
from mp_agent.node.accounting.windows import Bucket
from mp_agent.node.run.launches import Launch
from mp_agent.node.series.layer_budget import LayerBudgetState
from mp_agent.records.conditions import ConditionMemory
from mp_agent.ring.files import open_private, replace_atomically

log = logging.getLogger("mp_agent.node")

FORMAT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeTotals:
    """What the probes of ended attempts counted, and what the node agent itself lost."""

    probe_seconds: float = 0.0
    probe_errors: int = 0
    setting_errors: int = 0
    records_dropped: int = 0
    series_dropped: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Everything about a run that is not in its rings."""

    # Otherwise infinity became null, and the whole ledger could not be read any more.
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(ser_json_inf_nan="constants")

    format: int = FORMAT
    launches: tuple[Launch, ...] = ()
    """The launches that the account has reached."""
    newest_unix_ns: int = 0
    """When the newest ring of those launches was made; older launches are over."""
    begun_unix_ns: int = 0
    """When the first ring of the run was made: its counters began at 0 then. 0: not known."""
    attempts: int = 0
    """How often the run was started on this node."""
    read_launches: tuple[Launch, ...] = ()
    """Launches of earlier attempts whose rings were read to the end."""
    session: str = ""
    """Names the attempt of this node, toward the root."""
    retired_sessions: tuple[str, ...] = ()
    """Of all nodes, in the attempt before."""
    closed_sequence: int = 0
    closed_layers_sequence: int = 0
    """Steps and layer tables up to these are in the root's account: at the root in this one."""
    counted_sequence: int = 0
    """Steps up to this one are in the counts of the ranks of this node."""
    progress: Progress = field(default_factory=Progress)
    norms: list[Bucket] = field(default_factory=list)
    optimizer_norms: dict[str, list[Bucket]] = field(default_factory=dict)
    totals: list[Total] = field(default_factory=list)
    histograms: list[Cells] = field(default_factory=list)
    layer_budget: LayerBudgetState = field(default_factory=LayerBudgetState)
    assumed: dict[str, bool] = field(default_factory=dict)
    agent: ProbeTotals = field(default_factory=ProbeTotals)
    conditions: ConditionMemory = field(default_factory=ConditionMemory)


_ADAPTER = TypeAdapter(Ledger)


def read_ledger(path: Path) -> Ledger:
    """Return the ledger at `path`; an empty one when there is none or it cannot be used."""
    try:
        # What is no regular file might never end, or never begin.
        with os.fdopen(open_private(path), "rb") as file:
            ledger = _ADAPTER.validate_json(file.read())
    except FileNotFoundError:
        return Ledger()
    except (OSError, RingError, ValidationError) as error:
        log.warning("ledger %s cannot be used, counters start at 0: %s", path, error)
        return Ledger()
    if ledger.format != FORMAT:
        log.warning("ledger %s has format %d, counters start at 0", path, ledger.format)
        return Ledger()
    return ledger


def write_ledger(path: Path, ledger: Ledger) -> None:
    """Replace the ledger at `path` as a whole. Raises OSError when the directory is full."""
    replace_atomically(path, _ADAPTER.dump_json(ledger))
