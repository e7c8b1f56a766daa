"""The history of a run as samples: one number with its name, step, time and labels."""

import json
from collections.abc import Iterator
from math import isnan
from typing import NamedTuple

from mp_agent.backtest.log.training_log import TrainingLog
from mp_agent.errors import LogError
from mp_agent.node.cluster.root import MergedTable
from mp_agent.records.merged import MergedStep


class ExportedNumber(NamedTuple):
    """One number of a run. Fields are the columns of the files."""

    run: str
    step: int
    """The trainer's number; of a Prometheus, the last step at the time of the scrape."""
    time_unix_seconds: float
    name: str
    """Of a flight record `loss`, `grad_norm` or a column; of a Prometheus the metric."""
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
