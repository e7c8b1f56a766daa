"""`mp-agent compare`: the precisions of a model, or two runs."""

import sys
from pathlib import Path

import click

from mp_agent.backtest.options import period_options
from mp_agent.compare.formats import BY_NAME, DEFAULT_NAMES, REFERENCES
from mp_agent.compare.report.model import PrecisionReport, as_json
from mp_agent.compare.report.text import print_report
from mp_agent.compare.runs.command import compare_runs, compare_scraped_runs
from mp_agent.compare.target import is_target, load_target, progress_bar
from mp_agent.errors import CompareError, MpAgentError
from mp_agent.output import Console, refuse, write_whole
from mp_agent.version import require_torch


@click.command("compare")
@click.argument("target")
@click.argument("other", required=False)
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    type=click.Choice(tuple(BY_NAME)),
    help=f"A precision to compare; may be repeated. {', '.join(DEFAULT_NAMES)} by default.",
)
@click.option(
    "--reference",
    type=click.Choice(tuple(REFERENCES)),
    default="fp32",
    show_default=True,
    help="What is taken for exact.",
)
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0, min_open=True),
    default=1e-3,
    show_default=True,
    help="Mean absolute difference of the model's outputs below which a precision passes.",
)
@click.option(
    "--loss-scale",
    type=click.FloatRange(min=0, min_open=True),
    default=1.0,
    show_default=True,
    help="Factor of the candidate's loss, as GradScaler would have it.",
)
@click.option(
    "--search-trials",
    type=click.IntRange(min=0),
    default=40,
    show_default=True,
    help="Runs at most, for each precision that fails, to find what to keep in FP32; 0: none.",
)
@click.option(
    "--require",
    "required",
    multiple=True,
    type=click.Choice(tuple(BY_NAME)),
    help="Exit with 1 unless this precision passes; may be repeated.",
)
@click.option("--rows", type=click.IntRange(min=1), default=12, help="Modules or steps to print.")
@click.option("--json", "as_document", is_flag=True, help="Print the result as JSON.")
@click.option(
    "--html",
    "page",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the result, with plots, to one HTML file.",
)
@click.option(
    "--prometheus",
    default="",
    metavar="URL",
    help="TARGET and OTHER are names of runs that this Prometheus scraped.",
)
@click.option(
    "--start",
    default="30d",
    show_default=True,
    help="Of a Prometheus: begin of the range, as 2026-01-31T10:00, Unix seconds, or 6h for six "
    "hours ago.",
)
@click.option("--end", default="", help="Of a Prometheus: end of the range; now by default.")
@click.option(
    "--scrape-interval",
    default="15s",
    show_default=True,
    help="Of a Prometheus: time between two scrapes.",
)
def compare_command(
    target: str,
    other: str | None,
    dtypes: tuple[str, ...],
    reference: str,
    tolerance: float,
    loss_scale: float,
    search_trials: int,
    required: tuple[str, ...],
    rows: int,
    as_document: bool,
    page: Path | None,
    prometheus: str,
    start: str,
    end: str,
    scrape_interval: str,
) -> None:
    """Compare the precisions of a model module by module, or two runs step by step.

    TARGET alone is `script.py:function` or `package.module:function`: it is called without
    arguments and returns (model, batch) or (model, batch, loss). TARGET and OTHER are two runs:
    flight records, directories of runs in shared memory, or addresses of node agents
    (`http://host:9464`, `…/?run=NAME` where there are several); with --prometheus, their names.
    """
    try:
        if prometheus:
            if other is None:
                raise CompareError(f"--prometheus compares two runs; {target} is one")
            compare_scraped_runs(
                prometheus,
                (target, other),
                period_options(start, end, scrape_interval),
                rows=rows,
                as_document=as_document,
                page=page,
            )
            return
        if other is not None:
            compare_runs(target, other, rows=rows, as_document=as_document, page=page)
            return
        if not is_target(target):
            raise CompareError(
                f"{target}: is no script.py:function; to compare two runs, name both"
            )
        report = _compare(
            target,
            dtypes or DEFAULT_NAMES,
            reference,
            tolerance,
            loss_scale,
            search_trials,
            required,
        )
    except MpAgentError as error:
        refuse("compare", error)
    if page is not None:
        write_whole(page, report.as_html())
    if as_document:
        click.echo(as_json(report))
    elif page is not None:
        click.echo(str(page))
    else:
        print_report(report, Console(), rows=rows)
    sys.exit(0 if set(required) <= set(report.passed) else 1)


def _compare(
    target: str,
    dtypes: tuple[str, ...],
    reference: str,
    tolerance: float,
    loss_scale: float,
    search_trials: int,
    required: tuple[str, ...],
) -> PrecisionReport:
    require_torch()
    # Only here: comparing runs, and the help, need no torch.
    from mp_agent.compare.api import compare

    model, batch, loss = load_target(target)
    with progress_bar() as progress:
        return compare(
            model,
            batch,
            loss,
            dtypes=dict.fromkeys((*dtypes, *required)),
            reference=reference,
            tolerance=tolerance,
            loss_scale=loss_scale,
            search_trials=search_trials,
            progress=progress,
        )
