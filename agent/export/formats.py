"""Writes samples as CSV, Parquet or TensorBoard events."""

import csv
import re
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path

from mp_agent.errors import MpAgentError
from mp_agent.export.samples import ExportedNumber
from mp_agent.records.text import as_utf8
from mp_agent.ring.locations import run_directory

_ROWS_PER_GROUP = 100_000
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=-]{0,200}")
_OF_FORMULAS = ("=", "+", "-", "@", "\t", "\r")


class MissingExtraError(MpAgentError):
    """A package is missing that writes a format; the message says how to install it."""

    def __init__(self, package: str) -> None:
        super().__init__(f"{package} is missing: pip install 'mp-agent[export]'")


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
        raise MissingExtraError("pyarrow") from error
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
        raise MissingExtraError("tensorboardX") from error
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
"""By name: writes samples to a path that does not exist yet."""
