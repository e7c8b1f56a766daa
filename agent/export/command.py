"""`mp-agent export`: the history of runs, for other programs."""

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from mp_agent.backtest.log.training_log import TrainingLog
from mp_agent.backtest.options import read_options
from mp_agent.backtest.readers.find import read_logs
from mp_agent.errors import LogError
from mp_agent.export.formats import FORMATS, MissingExtraError
from mp_agent.export.samples import ExportedNumber, samples_of
from mp_agent.inputs.texts import printable
from mp_agent.output import new_file, refuse


@click.command("export")
@click.argument("source")
@click.option("--to", "form", type=click.Choice(list(FORMATS)), required=True, help="The format.")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="File to write, or directory for tensorboard; by default mp_agent_export, in the "
    "working directory, with the format's suffix.",
)
@click.option("--run", default="", help="Of a Prometheus: the run; all by default.")
@click.option(
    "--start",
    default="",
    help="Of a Prometheus: begin of the range, as 2026-01-31T10:00, Unix seconds, or 6h for six "
    "hours ago; a day before its end by default.",
)
@click.option("--end", default="", help="Of a Prometheus: end of the range; now by default.")
@click.option(
    "--scrape-interval",
    default="15s",
    show_default=True,
    help="Of a Prometheus: time between two samples.",
)
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
