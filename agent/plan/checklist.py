"""`mp-agent checklist`: nine points before a run, by check and by a short run of the script.

Each point is judged by rules of `mp-agent check`, by conditions that held in the short run, and by
what was measured in it; what none of these has looked at is said to be so.
"""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from math import isnan, sqrt
from pathlib import Path

import click

from mp_agent.alerting.condition import Condition
from mp_agent.alerting.conditions import (
    activations,
    gradient_layers,
    gradient_size,
    loop,
    loss_scale,
    nonfinite,
    optimizer,
    overflows,
    tensors,
)
from mp_agent.catalog.metrics.tensors import mean, norm, slice_imbalance
from mp_agent.errors import SettingError
from mp_agent.flight.postmortem.case import Case, norm_of
from mp_agent.flight.postmortem.diagnosis import ALERTING
from mp_agent.inputs.files import read_text
from mp_agent.lint.finding import CheckReport, Rule
from mp_agent.lint.rules import autocast, casts, gradients, loss, numerics, scaling
from mp_agent.lint.script import check_script, imported_files
from mp_agent.node.cluster.root import MergedTable
from mp_agent.output import Console, refuse
from mp_agent.plan.short_run import INPUT, ShortRun, run_shortly
from mp_agent.plan.target import CRASHED
from mp_agent.records.columns import ACTIVATIONS, TENSORS, ColumnFamily
from mp_agent.report import terminal
from mp_agent.report.content import Cell, Table
from mp_agent.report.document import plain, written
from mp_agent.report.numbers import number, scientific
from mp_agent.report.options import count_option, json_option
from mp_agent.version import require_torch

_STEPS = 100
_SECONDS = 600
_SOURCE_BYTES_MAX = 8 << 20
_RMS_LOW, _RMS_HIGH = 0.01, 10.0
"""Bounds of the root mean square of an input that is taken for normalized: 1 with mean 0 and
standard deviation 1, about 0.5 for images from 0 to 1, above 100 for images from 0 to 255."""


class PointVerdict(Enum):
    """What is known of a point."""

    FINE = "fine"
    WRONG = "wrong"
    NOT_LOOKED_AT = "not looked at"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedPoint:
    """One point of the list, with what it was judged by."""

    number: int
    title: str
    verdict: PointVerdict
    evidence: tuple[str, ...]
    advice: tuple[str, ...]
    """What to do about it, or how to have it looked at; none where it is fine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checklist:
    """The nine points in their order."""

    script: str
    files: int
    """Files of the script's project that check has read."""
    steps: int
    """Optimizer steps of the short run that were seen; 0 without one."""
    points: tuple[CheckedPoint, ...]
    notes: tuple[str, ...]

    @property
    def wrong(self) -> tuple[int, ...]:
        """Return the numbers of the points that are wrong."""
        return tuple(one.number for one in self.points if one.verdict is PointVerdict.WRONG)

    def as_json(self) -> str:
        """Return the list as JSON; docs/check.md describes it."""
        head = {"format": "mp_agent checklist", "version": 1}
        return written({**head, **plain(self), "wrong": self.wrong})


@dataclass(frozen=True)
class _Looked:
    """What there is to judge by."""

    code: CheckReport
    words: frozenset[str]
    """Names in the source of the script's project."""
    case: Case | None
    tables: tuple[MergedTable, ...] = ()

    @property
    def files(self) -> int:
        return self.code.files - len(self.code.skipped)

    @property
    def has_loop(self) -> bool:
        """Whether check has read a backward pass, and not only calls of what trains elsewhere."""
        return "backward" in self.words and bool(self.files)

    def fact(self, name: str) -> str:
        """Return a fact of the run; empty without a run."""
        return "" if self.case is None else self.case.evidence.facts.get(name, "")

    @cached_property
    def watched(self) -> dict[str, list[dict[str, float]]]:
        """The samples of each input and output of a model, by name."""
        found: dict[str, list[dict[str, float]]] = {}
        for name, row in self.rows(TENSORS):
            found.setdefault(name, []).append(row)
        return found

    def rows(self, family: ColumnFamily) -> Iterator[tuple[str, dict[str, float]]]:
        """Yield name and columns of each layer on each sampled step."""
        for table in self.tables:
            if (layers := table.families.get(family.name)) is None:
                continue
            for name, values in zip(layers.names, layers.values.tolist(), strict=True):
                row = zip(layers.family.names, values, strict=True)
                yield name, {column: value for column, value in row if not isnan(value)}


@dataclass(frozen=True, slots=True)
class _Seen:
    """Something that was looked at, and whether it is wrong."""

    text: str
    wrong: bool = False


def _casts(looked: _Looked) -> Iterator[_Seen]:
    if looked.has_loop:
        yield _Seen(f"check: no cast of what is trained, in {looked.files} file(s)")
    weights, masters = looked.fact("parameter_format"), looked.fact("master_format")
    if weights:
        narrow = bool({"fp16", "bf16"} & set(weights.split("+")))
        copies = f", the copies that are updated {masters}" if masters else ""
        yield _Seen(
            f"run: the weights are {weights}{copies or ', without FP32 copies' * narrow}",
            wrong=narrow and not masters,
        )


def _loss_under_autocast(looked: _Looked) -> Iterator[_Seen]:
    if "autocast" in looked.words and looked.has_loop:
        yield _Seen("check: no loss outside of autocast")
    elif looked.case is not None and not looked.fact("autocast_format"):
        yield _Seen("run: nothing was computed under autocast")


def _binary_cross_entropy(looked: _Looked) -> Iterator[_Seen]:
    if looked.has_loop:
        used = sorted(looked.words & {"binary_cross_entropy", "BCELoss"})
        what = f"{', '.join(used)}, but not under autocast" if used else "no binary_cross_entropy"
        yield _Seen(f"check: {what}, in {looked.files} file(s)")


def _clipping(looked: _Looked) -> Iterator[_Seen]:
    if looked.case is None or not looked.case.judged:
        return
    norms = [norm_of(step) for step in looked.case.judged]
    text = f"run: gradient norms {scientific(min(norms))} to {scientific(max(norms))}"
    limited = [step for step in looked.case.steps if step.get("clip_max_norm") is not None]
    if limited:
        clipped = sum((step.clip_coefficient or 1.0) < 1.0 for step in limited)
        limit = scientific(limited[-1].get("clip_max_norm"))
        yield _Seen(f"{text}, clipped to {limit} on {clipped} of {len(norms)} steps")
    else:
        yield _Seen(f"{text}, without clipping that is seen")


def _loss_scale(looked: _Looked) -> Iterator[_Seen]:
    if looked.case is None:
        return
    scales = [scale for step in looked.case.steps if (scale := step.loss_scale) is not None]
    precision = looked.fact("precision")
    if scales:
        skipped = sum(step.skipped for step in looked.case.steps)
        yield _Seen(
            f"run: loss scale {number(scales[0])} at first, {number(scales[-1])} at last, "
            f"{skipped} of {len(looked.case.steps)} steps skipped"
        )
    elif precision:
        short = precision == "fp16"
        why = "in whose range gradients underflow" if short else "which needs none"
        yield _Seen(f"run: no loss scale with {precision}, {why}", wrong=short)


def _inputs(looked: _Looked) -> Iterator[_Seen]:
    for name, samples in looked.watched.items():
        if f" {INPUT} " not in name:
            continue
        row = samples[-1]
        if "swallowed_sum" not in row:
            yield _Seen(f"run: {name} holds whole numbers: nothing to normalize")
            continue
        sizes = [_rms(one) for one in samples]
        yield _Seen(
            f"run: {name}: mean {scientific(mean(row))}, root mean square {scientific(sizes[-1])}, "
            f"largest magnitude {scientific(row.get('abs_max'))}",
            wrong=all(size > _RMS_HIGH or 0.0 < size < _RMS_LOW for size in sizes),
        )


def _rms(row: dict[str, float]) -> float:
    finite = row.get("elements", 0.0) - row.get("nonfinite_elements", 0.0)
    return (norm(row) or 0.0) / sqrt(finite) if finite else 0.0


def _initialization(looked: _Looked) -> Iterator[_Seen]:
    if looked.case is None or not looked.case.judged:
        return
    first = looked.case.judged[0]
    text = f"run: gradient norm {scientific(norm_of(first))} on step {first.step}"
    if (value := first.get("loss")) is not None:
        text += f", loss {scientific(value)}"
    yield _Seen(text)
    for table in looked.case.history.tables[:1]:
        norms = [sqrt(one) for one in table.column("sum_squares").tolist() if one >= 0.0]
        yield _Seen(
            f"run: gradient norms of {len(norms)} layers on step "
            f"{looked.case.number_of(table.sequence)}: {scientific(min(norms))} to "
            f"{scientific(max(norms))}"
        )


def _reductions(looked: _Looked) -> Iterator[_Seen]:
    outputs = [row["abs_max"] for _, row in looked.rows(ACTIVATIONS) if "abs_max" in row]
    if outputs:
        yield _Seen(f"run: largest magnitude of a module's output {scientific(max(outputs))}")


def _dimensions(looked: _Looked) -> Iterator[_Seen]:
    if looked.case is None:
        return
    limit = looked.case.limit("dimension_imbalance")
    for name, samples in looked.watched.items():
        ratios = [ratio for row in samples if (ratio := slice_imbalance(row)) is not None]
        if ratios:
            yield _Seen(
                f"run: {name}: largest range of a slice divided by the smallest "
                f"{scientific(ratios[-1])}; 16 bits lose the small one above {limit:g}",
                wrong=min(ratios) > limit,
            )


_SHORT_RUN = "A short run that makes optimizer steps shows it."
_LOOP = "No backward pass is in the script's files: what a library trains is not read by check."


@dataclass(frozen=True, slots=True, kw_only=True)
class _Point:
    """What a point is judged by; the remedies are those of rules and conditions."""

    title: str
    rules: tuple[Rule, ...] = ()
    conditions: tuple[Condition, ...] = ()
    look: Callable[[_Looked], Iterator[_Seen]]
    remedy: str
    """What to do where what was seen is wrong."""
    unseen: str
    """How to have it looked at."""


_POINTS = (
    _Point(
        title="no .half() or .bfloat16() on what is trained",
        rules=(casts.CAST_MODEL, casts.CAST_INPUT),
        conditions=(optimizer.UPDATES_LOST, optimizer.WEIGHTS_UNCHANGED),
        look=_casts,
        remedy="Keep FP32 weights and let autocast cast, or give the optimizer FP32 copies.",
        unseen=_LOOP,
    ),
    _Point(
        title="the loss is computed under autocast",
        rules=(autocast.LOSS_OUTSIDE_AUTOCAST, autocast.BACKWARD_UNDER_AUTOCAST),
        conditions=(loop.AUTOCAST_WITHOUT_EFFECT,),
        look=_loss_under_autocast,
        remedy="",
        unseen="Where a library turns autocast on, look at its loss there.",
    ),
    _Point(
        title="binary_cross_entropy_with_logits, not binary_cross_entropy",
        rules=(autocast.BINARY_CROSS_ENTROPY, loss.ACTIVATION_BEFORE_LOSS),
        look=_binary_cross_entropy,
        remedy="",
        unseen=_LOOP,
    ),
    _Point(
        title="gradients are clipped where the model needs it",
        rules=(scaling.CLIP_WITHOUT_UNSCALE, gradients.CLIPPED_AFTER_STEP),
        conditions=(
            gradient_size.GRADIENT_EXPLOSION,
            gradient_layers.LAYER_GRADIENT_EXPLOSION,
            nonfinite.CLIPPING_BEFORE_UNSCALE,
            loop.CLIPPING_AFTER_STEP,
        ),
        look=_clipping,
        remedy="",
        unseen=_SHORT_RUN,
    ),
    _Point(
        title="the loss scale holds",
        rules=(
            scaling.UNSCALE_TWICE,
            scaling.STEP_WITHOUT_UPDATE,
            scaling.STEP_BYPASSES_SCALER,
            scaling.FP16_WITHOUT_SCALER,
            scaling.SCALER_WITH_BF16,
        ),
        conditions=(
            *loss_scale.CONDITIONS,
            overflows.OVERFLOW_RATIO_HIGH,
            gradient_layers.GRADIENT_UNDERFLOW,
            nonfinite.GRADIENT_NONFINITE,
            nonfinite.NONFINITE_UPDATE,
        ),
        look=_loss_scale,
        remedy="Scale the loss by torch.amp.GradScaler, or use BF16.",
        unseen=_SHORT_RUN,
    ),
    _Point(
        title="inputs are normalized",
        look=_inputs,
        remedy="Normalize in the data: subtract the mean, divide by the standard deviation.",
        unseen=f"{_SHORT_RUN} It measures the tensors that the model's forward gets in training.",
    ),
    _Point(
        title="the initialization suits the model",
        conditions=(
            gradient_size.GRADIENT_VANISHING,
            gradient_layers.LAYER_GRADIENT_DEAD,
            gradient_layers.NOTHING_TRAINED,
            nonfinite.LOSS_NONFINITE,
        ),
        look=_initialization,
        remedy="",
        unseen=_SHORT_RUN,
    ),
    _Point(
        title="values fit the format before they are reduced",
        rules=(
            numerics.CANCELLING_VARIANCE,
            numerics.LOW_PRECISION_REDUCTION,
            numerics.LOW_PRECISION_FUNCTION,
        ),
        conditions=(
            tensors.REDUCTION_SWALLOWS,
            activations.ACTIVATION_NEAR_OVERFLOW,
            nonfinite.ACTIVATION_NONFINITE,
        ),
        look=_reductions,
        remedy="",
        unseen=_SHORT_RUN,
    ),
    _Point(
        title="no dimension outweighs the others",
        conditions=(tensors.DIMENSION_IMBALANCE,),
        look=_dimensions,
        remedy="Standardize each feature by itself.",
        unseen=f"{_SHORT_RUN} It compares the slices of inputs and outputs of the model; others "
        "are watched by mp_agent.watch_tensor with dim.",
    ),
)


def _checked(number: int, point: _Point, looked: _Looked) -> CheckedPoint:
    """Return the verdict on a point: wrong by anything, fine only by what was looked at."""
    rules = {rule.code: rule for rule in point.rules}
    findings = [one for one in looked.code.findings if one.code in rules]
    names = {condition.name for condition in point.conditions}
    held = [
        one
        for one in (looked.case.conditions if looked.case else ())
        if one.name in names and one.severity in ALERTING
    ]
    seen = list(point.look(looked))
    faults = [
        *(f"{one.path}:{one.span.line}: {one.code} {one.message}" for one in findings),
        *(f"run: {one.name} since step {one.since_step}: {one.description}" for one in held),
        *(one.text for one in seen if one.wrong),
    ]
    if faults:
        remedies = [rules[one.code].remedy for one in findings] + [one.remedy for one in held]
        remedies += [point.remedy for one in seen if one.wrong]
        # What check says where it finds nothing is not to be read together with what it has found.
        more = [one.text for one in seen if not one.wrong and one.text.startswith("run:")]
        verdict, evidence, advice = PointVerdict.WRONG, [*faults, *more], remedies
    elif seen:
        verdict, evidence, advice = PointVerdict.FINE, [one.text for one in seen], []
    else:
        verdict, evidence, advice = PointVerdict.NOT_LOOKED_AT, [], [point.unseen]
    return CheckedPoint(
        number=number,
        title=point.title,
        verdict=verdict,
        evidence=tuple(dict.fromkeys(evidence)),
        advice=tuple(dict.fromkeys(filter(None, advice))),
    )


def _others(looked: _Looked) -> Iterator[str]:
    """Yield what check and the run show besides, on no point of the list."""
    rules = {rule.code for point in _POINTS for rule in point.rules}
    names = {condition.name for point in _POINTS for condition in point.conditions}
    if others := sorted(set(looked.code.counts()) - rules):
        yield f"check finds {', '.join(others)} as well: `mp-agent check` shows where"
    if looked.case is not None:
        for one in looked.case.conditions:
            if one.name not in names and one.severity in ALERTING:
                yield f"run: {one.name} since step {one.since_step}: {one.description}"
    for skipped in looked.code.skipped:
        yield f"{skipped.path}: not checked: {skipped.reason}"


def go_through(
    script: Path, arguments: Sequence[str] = (), *, run: bool = True, steps: int, seconds: int
) -> tuple[Checklist, int]:
    """Return the list, and the exit status of the short run."""
    code = check_script(str(script))
    words = frozenset(
        word
        for file in imported_files(str(script.absolute()), code.files)
        for word in _words_of(Path(file))
    )
    short = ShortRun(None, (), "the script was not run", 0)
    if run:
        short = run_shortly(script, arguments, steps, seconds)
    looked = _Looked(code, words, short.case, short.tables)
    made = Checklist(
        script=str(script),
        files=looked.files,
        steps=len(short.case.steps) if short.case else 0,
        points=tuple(_checked(place, point, looked) for place, point in enumerate(_POINTS, 1)),
        notes=(*_of_run(short, steps), *_others(looked)),
    )
    return made, short.status


def _of_run(short: ShortRun, steps: int) -> Iterator[str]:
    if short.case is None:
        yield short.problem
    elif (made := len(short.case.steps)) < steps:
        yield f"the points are judged by {made} steps: the script made no more"
    if short.status:
        yield f"the script ended with status {short.status}"


def _words_of(path: Path) -> Iterator[str]:
    with suppress(OSError, ValueError):
        yield from re.findall(r"\w+", read_text(path, _SOURCE_BYTES_MAX))


_TONES = {PointVerdict.FINE: "good", PointVerdict.WRONG: "bad", PointVerdict.NOT_LOOKED_AT: "warn"}


def _print(made: Checklist, console: Console) -> None:
    counts = {verdict: 0 for verdict in PointVerdict}
    for point in made.points:
        counts[point.verdict] += 1
    text = ", ".join(f"{count} {verdict.value}" for verdict, count in counts.items())
    good = counts[PointVerdict.FINE] == len(made.points)
    console.print(terminal.verdict(f"{made.script}: {text}.", good=good))
    rows = [
        (
            str(point.number),
            Cell(point.verdict.value, _TONES[point.verdict]),
            "\n".join((point.title, *point.evidence, *(f"→ {one}" for one in point.advice))),
        )
        for point in made.points
    ]
    console.print(terminal.table(Table(("", "", ""), rows, text=(1, 2))))
    terminal.print_notes(console, made.notes)


@click.command("checklist", context_settings={"allow_interspersed_args": False})
@count_option("--steps", _STEPS, "Optimizer steps after which the short run is ended.")
@count_option("--seconds", _SECONDS, "Seconds after which it is ended in any case.")
@click.option("--no-run", is_flag=True, help="Do not run the script: only check reads it.")
@json_option("list")
@click.argument("script", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARG]…")
def checklist_command(
    script: Path,
    arguments: tuple[str, ...],
    steps: int,
    seconds: int,
    no_run: bool,
    as_document: bool,
) -> None:
    """Go through nine points before a run, and say which are fine, wrong, or not looked at.

    `mp-agent check` reads SCRIPT and what it imports of its project; then SCRIPT is run with its
    arguments for some steps, and measured. It does what it always does, such as writing
    checkpoints, and its output goes to standard error. Exit status: 0 nothing is wrong, 1 a point
    is wrong, 2 wrong use, 3 the script itself failed.
    """
    if not no_run:
        require_torch()
    try:
        made, status = go_through(script, arguments, run=not no_run, steps=steps, seconds=seconds)
    except SettingError as error:
        refuse("checklist", error)
    if as_document:
        click.echo(made.as_json())
    else:
        _print(made, Console(highlight=False))
    sys.exit(CRASHED if status else 1 if made.wrong else 0)
