"""What a flight record holds: its archive as rows and tables, and errors of GPUs."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from mp_agent.alerting.site import Assignments, usable_values
from mp_agent.alerting.values import Values, values_in_force
from mp_agent.catalog.thresholds import DEFAULTS, resolve
from mp_agent.errors import FlightError, SettingError
from mp_agent.flight.record.archive import read_archive
from mp_agent.inputs.files import check_text, read_lines
from mp_agent.records.conditions import ActiveCondition
from mp_agent.records.flight import NodeRecord, RankLog, Segment
from mp_agent.records.schema import RankIdentity
from mp_agent.records.steps import LayerTable, StepRecord
from mp_agent.settings import Settings

_XID = re.compile(r"NVRM: Xid \((?:PCI:)?(?P<gpu>[0-9A-Fa-f:.]+)\): (?P<xid>\d{1,9})")
_DCGM = re.compile(
    r'^DCGM_FI_DEV_XID_ERRORS\{[^}]*gpu="(?P<gpu>[^"]*)"[^}]*\} (?P<xid>\d{1,9})(?:\.0*)?\b'
)
_TIME = re.compile(
    r"^\[?(?P<time>\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?)"
)
_LINE_CHARACTERS_MAX = 10_000
_OF_PROGRAMS = frozenset({13, 31, 43, 45, 68})
"""XIDs that a program or its stop brings about; NVIDIA, "XID Errors"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuError:
    """An XID: which GPU, and when, if the source says so."""

    xid: int
    gpu: str
    source: str
    time_unix_seconds: float | None = None

    @property
    def of_hardware(self) -> bool:
        """Whether the number stands for faults of GPU, memory, link or driver."""
        return self.xid not in _OF_PROGRAMS


def read_gpu_errors(path: Path) -> tuple[GpuError, ...]:
    """Return the XIDs in a file, each once, in its order.

    The file holds the output of `dmesg --time-format=iso` or `journalctl -k -o short-iso` (times in
    seconds since boot are not used), or the exposition text of DCGM's exporter. Raises FlightError,
    naming the file, if it cannot be read.
    """
    try:
        check_text(path)
        return tuple(dict.fromkeys(_errors(path)))
    except OSError as error:
        raise FlightError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise FlightError(f"{path}: {error}") from error


def _errors(path: Path) -> Iterator[GpuError]:
    for _, line in read_lines(path, _LINE_CHARACTERS_MAX):
        if found := _XID.search(line):
            yield GpuError(
                xid=int(found["xid"]),
                gpu=found["gpu"],
                source="The kernel log",
                time_unix_seconds=_moment(line),
            )
        elif (found := _DCGM.search(line)) and int(found["xid"]):
            yield GpuError(xid=int(found["xid"]), gpu=found["gpu"], source="DCGM")


def _moment(line: str) -> float | None:
    """Return the time at the start of a line; a time without a zone is local."""
    found = _TIME.search(line)
    if found is None:
        return None
    text = found["time"].replace(",", ".").replace("Z", "+00:00")
    text = re.sub(r"([+-]\d\d)(\d\d)$", r"\1:\2", text)
    text = re.sub(r"\.(\d+)", lambda m: "." + m[1][:6].ljust(6, "0"), text)
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def values_of(settings: Settings, *, logged: bool = True) -> Values:
    """Return what a node agent with these settings judges by.

    logged: whether it is logged which of them it ignores.
    """
    return usable_values(settings, time_scale=settings.time_scale, logged=logged)[0]


def recorded_values(thresholds: Mapping[str, float], settings: Mapping[str, Any]) -> Values:
    """Return what a node agent judged by, from its flight record.

    thresholds, settings: the record's; names that this release does not know are ignored.
    """
    known = {name: value for name, value in thresholds.items() if name in DEFAULTS}
    alerts, scale = settings.get("alerts"), settings.get("time_scale")
    recorded = Settings.model_construct(
        thresholds=known,
        alerts=alerts if isinstance(alerts, dict) else {},
        time_scale=scale if isinstance(scale, int | float) and 1e-6 <= scale <= 1e6 else 1.0,
    )
    try:
        return values_of(recorded)
    except SettingError:
        # A later release may relate its thresholds differently; what it judged by still holds.
        return replace(values_in_force(), limits={**DEFAULTS, **known})


def with_assignments(values: Values, texts: Iterable[str]) -> Values:
    """Return values changed by `NAME=VALUE` texts, as `mp-agent rules --set` takes them.

    Raises SettingError, naming the text, for one that is invalid. Severities and selectors are
    accepted without effect.
    """
    chosen = Assignments()
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals:
            raise SettingError(f"{text!r} sets nothing; write NAME=VALUE")
        chosen.set(name, value)
    return replace(
        values,
        limits=resolve({**values.limits, **chosen.thresholds}),
        seconds={**values.seconds, **chosen.durations},
    )


_Row = TypeVar("_Row", StepRecord, LayerTable)

_SAME_START_NS = 600 * 10**9
"""The ranks of an attempt start together; skewed clocks and slow imports separate them by no more
than this."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evidence:
    """One attempt of a run. `ranks` holds each rank once, ascending."""

    source: Path
    ranks: tuple[RankLog, ...]
    read_unix_seconds: float
    """When the ranks' states were read: up to then they had written nothing more."""
    values: Values = field(default_factory=values_in_force)
    """The thresholds and durations that the run was judged by."""
    reasons: tuple[str, ...] = ()
    """Why the records were made; empty when the rows come from shared memory."""
    conditions: tuple[ActiveCondition, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    gpu_errors: tuple[GpuError, ...] = ()
    """Errors of the GPUs of the run's machines, where someone gave them."""
    notes: tuple[str, ...] = ()
    """What could not be read, or was omitted."""

    @property
    def identity(self) -> RankIdentity:
        """Identity of the lowest rank."""
        return self.ranks[0].identity

    @property
    def facts(self) -> Mapping[str, str]:
        """Facts of the lowest rank that knows them."""
        segments = (segment for log in self.ranks for segment in reversed(log.segments))
        return next((dict(segment.schema.facts) for segment in segments), {})


def one_attempt(logs: Iterable[RankLog]) -> tuple[RankLog, ...]:
    """Return the ranks of the newest attempt among the logs, each once, ascending.

    Logs of the same process become one: rows of both, the state of the later one.
    """
    logs = list(logs)
    newest = max(logs, key=lambda log: log.identity.created_unix_ns, default=None)
    if newest is None:
        return ()
    found: dict[int, RankLog] = {}
    for log in sorted(logs, key=_age):
        if _belongs(log.identity, newest.identity):
            known = found.get(log.identity.rank)
            same = known is not None and known.identity == log.identity
            found[log.identity.rank] = _joined(known, log) if known and same else log
    return tuple(found[rank] for rank in sorted(found))


def gather(
    source: Path, records: Sequence[NodeRecord], notes: Sequence[str] = ()
) -> Evidence | None:
    """Return the evidence that a run's records hold on its newest attempt; None without a rank."""
    ranks = one_attempt(log for record in records for log in record.ranks)
    if not ranks:
        return None
    kept = {log.identity for log in ranks}
    used = [r for r in records if any(log.identity in kept for log in r.ranks)]
    used.sort(key=lambda record: record.written_unix_seconds)
    left_out = sum(record.left_out for record in used)
    notes = [*notes, *_strangers(records, used)]
    return Evidence(
        source=source,
        ranks=ranks,
        values=recorded_values(used[-1].thresholds, used[-1].settings),
        read_unix_seconds=used[-1].written_unix_seconds,
        reasons=tuple(dict.fromkeys(record.request.reason for record in used)),
        conditions=_conditions(used),
        settings=used[-1].settings,
        versions=used[-1].versions,
        notes=(*notes, *([f"{left_out} rows were omitted for size"] if left_out else [])),
    )


def _strangers(records: Sequence[NodeRecord], used: Sequence[NodeRecord]) -> Iterator[str]:
    """Yield what is said of records that do not belong to the attempt; not of earlier attempts'."""
    run, names = used[-1].run, {record.request.name for record in used}
    for record in records:
        node = f"the record of node {record.node_rank}, written on {record.host}"
        if record.run != run:
            yield f"{node}, is of another run, {record.run}, and left out"
        elif record.request.name in names and record not in used:
            yield f"{node}, is of another attempt, and left out"


def _age(log: RankLog) -> tuple[int, int, int]:
    state = log.state
    return (log.identity.created_unix_ns, state.committed_sequence, state.phase_unix_ns)


def _belongs(identity: RankIdentity, newest: RankIdentity) -> bool:
    return (
        identity.run == newest.run
        and identity.world_size == newest.world_size
        and identity.attempt == newest.attempt
        and newest.created_unix_ns - identity.created_unix_ns <= _SAME_START_NS
    )


def _joined(earlier: RankLog, later: RankLog) -> RankLog:
    """Return both logs of a process as one; segments of the same schema become one."""
    segments: dict[int, Segment] = {}
    for segment in (*earlier.segments, *later.segments):
        index = next((i for i, s in segments.items() if s.schema == segment.schema), None)
        if index is None:
            segments[len(segments)] = segment
        else:
            known = segments[index]
            segments[index] = replace(
                known,
                steps=_union(known.steps, segment.steps),
                tables=_union(known.tables, segment.tables),
            )
    return replace(later, segments=tuple(segments.values()))


def _union(earlier: tuple[_Row, ...], later: tuple[_Row, ...]) -> tuple[_Row, ...]:
    rows: dict[int, _Row] = {row.sequence: row for row in earlier}
    rows.update({row.sequence: row for row in later})
    return tuple(rows[sequence] for sequence in sorted(rows))


def _conditions(records: Sequence[NodeRecord]) -> tuple[ActiveCondition, ...]:
    """Return the conditions in any record, each as first recorded."""
    found: dict[tuple[str, str], ActiveCondition] = {}
    for record in records:
        trigger = record.request.trigger
        named = (*record.conditions, *([trigger.condition] if trigger else []))
        for condition in named:
            found.setdefault((condition.name, condition.severity), condition)
    return tuple(found.values())


_PATTERN = "node*.npz"
_FILES_MAX = 20_000


def load(path: Path) -> Evidence:
    """Return the evidence at `path`: a node's file, a record's directory, or all records of a run.

    Raises FlightError, naming the path, when there is none or it cannot be read. Of several files,
    those that cannot be read are noted and skipped, as long as one can.
    """
    if not path.exists():
        raise FlightError(f"{path}: no such file or directory")
    if path.is_dir():
        return _load_directory(path)
    evidence = gather(path, [read_archive(path)])
    if evidence is None:
        raise FlightError(f"{path}: the record holds no rank")
    return evidence


def _load_directory(path: Path) -> Evidence:
    try:
        files = sorted(path.glob(_PATTERN)) or sorted(path.glob(f"*/{_PATTERN}"))
        files = files or sorted(path.glob(f"*/*/{_PATTERN}"))
    except OSError as error:
        raise FlightError(f"{path}: {error.strerror}") from error
    runs = {file.parents[1] for file in files} - {path, path.parent}
    if len(runs) > 1:
        names = ", ".join(sorted(run.name for run in runs))
        raise FlightError(f"{path}: holds the records of several runs; name one of them: {names}")
    if not files:
        raise FlightError(f"{path}: holds no flight record and no ring")
    records, problems = _read_all(files)
    if not records:
        raise FlightError(problems[0])
    evidence = gather(path, records, problems)
    if evidence is None:
        raise FlightError(f"{path}: the records hold no rank")
    return evidence


def _read_all(files: Iterable[Path]) -> tuple[list[NodeRecord], list[str]]:
    records, problems = [], []
    for number, file in enumerate(files):
        if number >= _FILES_MAX:
            problems.append(f"{file}: it and further files are not read: more than {_FILES_MAX}")
            break
        try:
            records.append(read_archive(file))
        except FlightError as error:
            problems.append(str(error))
    return records, problems
