"""Reports whose steps are sent as blocks, as single steps again."""

from collections.abc import Iterator, Sequence
from math import nan

from msgspec.structs import replace

from mp_agent.records.node_report import NodeReport, NodeRow, NodeStep, StepValue
from mp_agent.records.schema import FamilyColumns
from mp_agent.records.steps import StepBlock


def expanded(report: NodeReport) -> NodeReport:
    """Return a report with its blocks as single steps."""
    steps = [
        step
        for block in report.blocks
        for step in _steps(block, len(report.step_columns), report.families)
    ]
    ascending = sorted([*report.steps, *steps], key=lambda step: step.sequence)
    return replace(report, steps=tuple(ascending), blocks=())


def _steps(block: StepBlock, columns: int, families: Sequence[FamilyColumns]) -> Iterator[NodeStep]:
    form, digests = block.form, block.digest_array()
    for at, values in enumerate(block.array().tolist()):
        observed = dict(zip(form.places, zip(form.counts, values, strict=False), strict=True))
        place, digest = len(form.places), 0
        compute_seconds = tuple(values[place : place + len(form.ranks)])
        losses = tuple(values[place + len(form.ranks) : form.first_of_rows])
        place = form.first_of_rows
        rows = []
        for row in form.rows:
            widths = len(families[row.family].columns), len(row.shards) if row.compared else 0
            found = dict(zip(row.places, values[place : place + len(row.places)], strict=True))
            rows.append(
                NodeRow(
                    family=row.family,
                    share=row.share,
                    shards=row.shards,
                    replicas=row.replicas,
                    ranks=row.ranks,
                    columns=tuple(found.get(column, nan) for column in range(widths[0])),
                    digests=tuple(digests[at, digest : digest + widths[1]].tolist()),
                )
            )
            place, digest = place + len(row.places), digest + widths[1]
        yield NodeStep(
            sequence=block.sequences[at],
            step=block.steps[at],
            time_unix_seconds=block.times_unix_seconds[at],
            ranks=form.ranks,
            holding=form.holding,
            values=tuple(
                StepValue(count=count, value=value)
                for count, value in (observed.get(place, (0, nan)) for place in range(columns))
            ),
            rows=tuple(rows),
            compute_seconds=compute_seconds,
            losses=losses,
        )
