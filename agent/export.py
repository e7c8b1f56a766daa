"""Writes the series of past runs to files: `mp-agent export`."""

import csv
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from math import isnan
from pathlib import Path
from typing import NamedTuple

import click

from mp_agent.backtest.log.training_log import TrainingLog
from mp_agent.backtest.options import period_of_prometheus, read_options, run_of_prometheus
from mp_agent.backtest.readers.find import read_logs
from mp_agent.errors import LogError, MpAgentError
from mp_agent.inputs.files import as_utf8, printable
from mp_agent.node.cluster.root import MergedTable
from mp_agent.output import new_file, refuse
from mp_agent.records.merged import MergedStep
from mp_agent.ring.locations import run_directory


class ExportedNumber(NamedTuple):
    """One number of a run. Fields are the columns of the files."""

    run: str
    step: int
    """The trainer's number; of a Prometheus, the last step at the time of the scrape."""
    time_unix_seconds: float
    name: str
    """Name: `loss`, `grad_norm` or a column of a flight record; the metric of a Prometheus."""
    layer: str
    """Empty for numbers of the whole run."""
    labels: str
    """The other labels, as JSON; empty without any."""
    value: float


def samples_of(log: TrainingLog) -> Iterator[ExportedNumber]:
    """Yield what a log holds, in the order of time; non-finite losses and norms are left out.

    Raises LogError for a log that is neither a flight record nor of a Prometheus.
    """
    if log.merged:
        yield from _of_record(log)
    elif log.scrapes:
        yield from _of_scrapes(log)
    else:
        raise LogError(
            f"{log.source}: is a log of format {log.format}; a flight record or the address of a "
            "Prometheus can be exported"
        )


def _of_record(log: TrainingLog) -> Iterator[ExportedNumber]:
    steps = {item.sequence: item for item in log.merged if isinstance(item, MergedStep)}
    for item in log.merged:
        if isinstance(item, MergedStep):
            numbers = dict(item.columns)
            if (norm := item.grad_norm) is not None:
                numbers["grad_norm"] = norm
            for family, columns in item.families.items():
                numbers.update({f"{family}.{name}": value for name, value in columns.items()})
            for name, value in numbers.items():
                yield ExportedNumber(
                    log.name, item.step, item.time_unix_seconds, name, "", "", value
                )
        elif item.sequence in steps:
            yield from _of_layers(log.name, steps[item.sequence], item)


def _of_layers(run: str, step: MergedStep, table: MergedTable) -> Iterator[ExportedNumber]:
    for family, layers in table.families.items():
        for layer, row in zip(layers.names, layers.values, strict=True):
            for column, value in zip(layers.family.columns, row.tolist(), strict=True):
                if not isnan(value):
                    name = f"{family}.{column.name}"
                    yield ExportedNumber(
                        run, step.step, step.time_unix_seconds, name, layer, "", value
                    )


def _of_scrapes(log: TrainingLog) -> Iterator[ExportedNumber]:
    for scrape, point in zip(log.scrapes, log.points, strict=True):
        for (name, pairs), value in scrape.readings:
            labels = dict(pairs)
            layer = labels.pop("layer", "")
            others = json.dumps(labels, sort_keys=True) if labels else ""
            yield ExportedNumber(
                log.name, point.step, scrape.time_seconds, name, layer, others, value
            )


_ROWS_PER_GROUP = 100_000
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=-]{0,200}")
_OF_FORMULAS = ("=", "+", "-", "@", "\t", "\r")


class MissingExtraError(MpAgentError):
    """A package is missing that writes a format; the message says how to install it."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is missing: pip install 'mp-agent[{extra}]'")


def write_csv(path: Path, samples: Iterable[ExportedNumber]) -> int:
    """Write a file with a header line; return the number of samples.

    A name that a spreadsheet would take for a formula gets an apostrophe in front.
    """
    count = 0
    with path.open("x", encoding="utf-8", errors="backslashreplace", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(ExportedNumber._fields)
        for sample in samples:
            writer.writerow(map(_cell, sample))
            count += 1
    return count


def _cell(value: object) -> object:
    return f"'{value}" if isinstance(value, str) and value.startswith(_OF_FORMULAS) else value


def write_parquet(path: Path, samples: Iterable[ExportedNumber]) -> int:
    """Write a Parquet file, compressed; return the number of samples.

    Raises MissingExtraError without pyarrow.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise MissingExtraError("pyarrow", "parquet") from error
    texts = pa.dictionary(pa.int32(), pa.string())
    types = (texts, pa.int64(), pa.float64(), texts, texts, texts, pa.float64())
    schema = pa.schema(list(zip(ExportedNumber._fields, types, strict=True)))
    remaining, count = iter(samples), 0
    with path.open("xb") as file, pq.ParquetWriter(file, schema, compression="zstd") as writer:
        while rows := list(islice(remaining, _ROWS_PER_GROUP)):
            columns = zip(*(map(_as_utf8, row) for row in rows), strict=True)
            arrays = [
                pa.array(column, type=kind) for column, kind in zip(columns, types, strict=True)
            ]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))
            count += len(rows)
    return count


def _as_utf8(value: object) -> object:
    return as_utf8(value) if isinstance(value, str) else value


def write_tensorboard(path: Path, samples: Iterable[ExportedNumber]) -> int:
    """Write scalars into a directory, each run in one of its own; return the number of samples.

    A tag is the name, then the layer and the labels, separated by `/`.
    Raises MissingExtraError without tensorboardX.
    """
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise MissingExtraError("tensorboardX", "tensorboard") from error
    writers: dict[str, SummaryWriter] = {}
    count = 0
    path.mkdir()
    try:
        for sample in samples:
            if sample.run not in writers:
                # A name may be `..`, absolute, or hold what no file may be called.
                plain = _PLAIN.fullmatch(sample.run)
                directory = path / sample.run if plain else run_directory(path, sample.run)
                writers[sample.run] = SummaryWriter(str(directory))
            tag = "/".join(filter(None, (sample.name, sample.layer, sample.labels)))
            tag = as_utf8(tag)
            writers[sample.run].add_scalar(
                tag, sample.value, sample.step, walltime=sample.time_unix_seconds
            )
            count += 1
    finally:
        for writer in writers.values():
            writer.close()
    return count


FORMATS: Mapping[str, Callable[[Path, Iterable[ExportedNumber]], int]] = {
    "parquet": write_parquet,
    "csv": write_csv,
    "tensorboard": write_tensorboard,
}
"""Writers by name of format: each writes samples to a path that does not exist yet."""


@click.command("export")
@click.argument("source")
@click.option("--to", "form", type=click.Choice(list(FORMATS)), required=True, help="The format.")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="File to write, or directory for tensorboard; by default mp_agent_export, in the "
    "working directory, with the format's suffix.",
)
@run_of_prometheus
@period_of_prometheus(between="samples")
def export_command(
    source: str,
    form: str,
    output: Path | None,
    run: str,
    start: str,
    end: str,
    scrape_interval: str,
) -> None:
    """Write the metrics of a run to a file: one row per number, with step, time and layer.

    SOURCE is a flight record (its directory, or one node's file), or the address of a Prometheus.
    Numbers of a flight record have the names of its columns, those of a Prometheus the names of
    metrics. Prints the number of samples. A file that exists is not overwritten.
    """
    suffix = "" if form == "tensorboard" else f".{form}"
    path = output or Path(f"mp_agent_export{suffix}")
    if os.path.lexists(path):
        refuse("export", f"{path}: exists already")
    options = read_options("", (), run, start, end, scrape_interval, every_series=True)
    try:
        logs = read_logs(source, options)
        with new_file(path) as partial:
            count = FORMATS[form](partial, _samples(logs))
    except (LogError, MissingExtraError) as error:
        refuse("export", error)
    click.echo(printable(f"{path}: {count} samples"))
    for note in dict.fromkeys(note for log in logs for note in log.notes):
        print(printable(f"note: {note}"), file=sys.stderr)


def _samples(logs: Sequence[TrainingLog]) -> Iterator[ExportedNumber]:
    for log in logs:
        yield from samples_of(log)
