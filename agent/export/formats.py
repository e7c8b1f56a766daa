"""Writes samples as CSV, Parquet or TensorBoard events."""

import csv
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path

from mp_agent.errors import MpAgentError
from mp_agent.export.samples import ExportedNumber

_ROWS_PER_GROUP = 100_000


class MissingExtraError(MpAgentError):
    """A package is missing that writes a format; the message says how to install it."""

    def __init__(self, package: str) -> None:
        super().__init__(f"{package} is missing: pip install 'mp-agent[export]'")


def write_csv(path: Path, samples: Iterable[ExportedNumber]) -> int:
    """Write a file with a header line; return the number of samples."""
    count = 0
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(ExportedNumber._fields)
        for sample in samples:
            writer.writerow(sample)
            count += 1
    return count


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
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        while rows := list(islice(remaining, _ROWS_PER_GROUP)):
            columns = zip(*rows, strict=True)
            arrays = [
                pa.array(column, type=kind) for column, kind in zip(columns, types, strict=True)
            ]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))
            count += len(rows)
    return count


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
    try:
        for sample in samples:
            if sample.run not in writers:
                directory = path / sample.run.replace("/", "_")
                writers[sample.run] = SummaryWriter(str(directory))
            tag = "/".join(filter(None, (sample.name, sample.layer, sample.labels)))
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
