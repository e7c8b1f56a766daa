"""The nine points of the checklist: what each is judged by, and what was seen of it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import isnan, sqrt

from mp_agent.alerting.condition import Condition
from mp_agent.alerting.conditions import (
    activations,
    gradient_layers,
    gradient_size,
    loop,
    loss_scale,
    mixed_precision,
    nonfinite,
    optimizer,
    parameters,
    tensors,
)
from mp_agent.catalog.metrics.tensors import mean, norm, slice_imbalance
from mp_agent.flight.postmortem.case import Case, norm_of
from mp_agent.lint.finding import CheckReport, Rule
from mp_agent.lint.rules import autocast, casts, gradients, numerics, scaling
from mp_agent.node.cluster.root import MergedTable
from mp_agent.plan.short_run import INPUT
from mp_agent.records.columns import ACTIVATIONS, TENSORS, ColumnFamily
from mp_agent.report.numbers import number, scientific

_RMS_LOW, _RMS_HIGH = 0.01, 10.0
"""Bounds of the root mean square of an input that is taken for normalized: 1 with mean 0 and
standard deviation 1, about 0.5 for images from 0 to 1, above 100 for images from 0 to 255."""


@dataclass(frozen=True)
class Looked:
    """What there is to judge by."""

    code: CheckReport
    words: frozenset[str]
    """Names in the source of the script's project."""
    case: Case | None
    tables: tuple[MergedTable, ...] = ()

    @property
    def files(self) -> int:
        """Number of files that check has read."""
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
class PointEvidence:
    """Something that was looked at, and whether it is wrong."""

    text: str
    wrong: bool = False


def _casts(looked: Looked) -> Iterator[PointEvidence]:
    if looked.has_loop:
        yield PointEvidence(f"check: no cast of what is trained, in {looked.files} file(s)")
    weights, masters = looked.fact("parameter_format"), looked.fact("master_format")
    if weights:
        narrow = bool({"fp16", "bf16"} & set(weights.split("+")))
        copies = f", the copies that are updated {masters}" if masters else ""
        yield PointEvidence(
            f"run: the weights are {weights}{copies or ', without FP32 copies' * narrow}",
            wrong=narrow and not masters,
        )


def _loss_under_autocast(looked: Looked) -> Iterator[PointEvidence]:
    if "autocast" in looked.words and looked.has_loop:
        yield PointEvidence("check: no loss outside of autocast")
    if looked.case is not None and not looked.fact("autocast_format"):
        yield PointEvidence("run: nothing was computed under autocast")


def _binary_cross_entropy(looked: Looked) -> Iterator[PointEvidence]:
    if looked.has_loop:
        used = sorted(looked.words & {"binary_cross_entropy", "BCELoss"})
        what = f"{', '.join(used)}, but not under autocast" if used else "no binary_cross_entropy"
        yield PointEvidence(f"check: {what}, in {looked.files} file(s)")


def _clipping(looked: Looked) -> Iterator[PointEvidence]:
    if looked.case is None or not looked.case.judged:
        return
    norms = [norm_of(step) for step in looked.case.judged]
    text = f"run: gradient norms {scientific(min(norms))} to {scientific(max(norms))}"
    limited = [step for step in looked.case.steps if step.get("clip_max_norm") is not None]
    if limited:
        clipped = sum((step.clip_coefficient or 1.0) < 1.0 for step in limited)
        limit = scientific(limited[-1].get("clip_max_norm"))
        yield PointEvidence(f"{text}, clipped to {limit} on {clipped} of {len(norms)} steps")
    else:
        yield PointEvidence(f"{text}, without clipping that is seen")


def _loss_scale(looked: Looked) -> Iterator[PointEvidence]:
    if looked.case is None:
        return
    scales = [scale for step in looked.case.steps if (scale := step.loss_scale) is not None]
    precision = looked.fact("precision")
    if scales:
        skipped = sum(step.skipped for step in looked.case.steps)
        yield PointEvidence(
            f"run: loss scale {number(scales[0])} at first, {number(scales[-1])} at last, "
            f"{skipped} of {len(looked.case.steps)} steps skipped"
        )
    elif precision:
        short = precision == "fp16"
        why = "in whose range gradients underflow" if short else "which needs none"
        yield PointEvidence(f"run: no loss scale with {precision}, {why}", wrong=short)


def _inputs(looked: Looked) -> Iterator[PointEvidence]:
    for name, samples in looked.watched.items():
        if f" {INPUT} " not in name:
            continue
        row = samples[-1]
        if "swallowed_sum" not in row:
            yield PointEvidence(f"run: {name} holds whole numbers: nothing to normalize")
            continue
        sizes = [_rms(one) for one in samples]
        yield PointEvidence(
            f"run: {name}: mean {scientific(mean(row))}, root mean square {scientific(sizes[-1])}, "
            f"largest magnitude {scientific(row.get('abs_max'))}",
            wrong=all(size > _RMS_HIGH or 0.0 < size < _RMS_LOW for size in sizes),
        )


def _rms(row: dict[str, float]) -> float:
    finite = row.get("elements", 0.0) - row.get("nonfinite_elements", 0.0)
    return (norm(row) or 0.0) / sqrt(finite) if finite else 0.0


def _initialization(looked: Looked) -> Iterator[PointEvidence]:
    if looked.case is None or not looked.case.judged:
        return
    first = looked.case.judged[0]
    text = f"run: gradient norm {scientific(norm_of(first))} on step {first.step}"
    if (value := first.get("loss")) is not None:
        text += f", loss {scientific(value)}"
    yield PointEvidence(text)
    for table in looked.case.history.tables[:1]:
        norms = [sqrt(one) for one in table.column("sum_squares").tolist() if one >= 0.0]
        if not norms:
            continue
        yield PointEvidence(
            f"run: gradient norms of {len(norms)} layers on step "
            f"{looked.case.number_of(table.sequence)}: {scientific(min(norms))} to "
            f"{scientific(max(norms))}"
        )


def _reductions(looked: Looked) -> Iterator[PointEvidence]:
    outputs = [row["abs_max"] for _, row in looked.rows(ACTIVATIONS) if "abs_max" in row]
    if outputs:
        yield PointEvidence(
            f"run: largest magnitude of a module's output {scientific(max(outputs))}"
        )


def _dimensions(looked: Looked) -> Iterator[PointEvidence]:
    if looked.case is None:
        return
    limit = looked.case.limit("dimension_imbalance")
    for name, samples in looked.watched.items():
        ratios = [ratio for row in samples if (ratio := slice_imbalance(row)) is not None]
        if ratios:
            yield PointEvidence(
                f"run: {name}: largest range of a slice divided by the smallest "
                f"{scientific(ratios[-1])}; 16 bits lose the small one above {limit:g}",
                wrong=min(ratios) > limit,
            )


_SHORT_RUN = "A short run that makes optimizer steps shows it."
_LOOP = "No backward pass is in the script's files: what a library trains is not read by check."


@dataclass(frozen=True, slots=True, kw_only=True)
class ChecklistPoint:
    """What a point is judged by; the remedies are those of rules and conditions."""

    title: str
    rules: tuple[Rule, ...] = ()
    conditions: tuple[Condition, ...] = ()
    look: Callable[[Looked], Iterator[PointEvidence]]
    remedy: str
    """What to do where what was seen is wrong."""
    unseen: str
    """How to have it looked at."""


POINTS = (
    ChecklistPoint(
        title="no .half() or .bfloat16() on what is trained",
        rules=(casts.CAST_MODEL, casts.CAST_INPUT),
        conditions=(optimizer.UPDATES_LOST, parameters.WEIGHTS_UNCHANGED),
        look=_casts,
        remedy="Keep FP32 weights and let autocast cast, or give the optimizer FP32 copies.",
        unseen=_LOOP,
    ),
    ChecklistPoint(
        title="the loss is computed under autocast",
        rules=(autocast.LOSS_OUTSIDE_AUTOCAST, autocast.BACKWARD_UNDER_AUTOCAST),
        conditions=(mixed_precision.AUTOCAST_WITHOUT_EFFECT, mixed_precision.LOSS_IN_16_BITS),
        look=_loss_under_autocast,
        remedy="",
        unseen="Where a library turns autocast on, look at its loss there.",
    ),
    ChecklistPoint(
        title="binary_cross_entropy_with_logits, not binary_cross_entropy",
        rules=(autocast.BINARY_CROSS_ENTROPY, numerics.ACTIVATION_BEFORE_LOSS),
        look=_binary_cross_entropy,
        remedy="",
        unseen=_LOOP,
    ),
    ChecklistPoint(
        title="gradients are clipped where the model needs it",
        rules=(scaling.CLIP_WITHOUT_UNSCALE, gradients.CLIPPED_AFTER_STEP),
        conditions=(
            gradient_size.GRADIENT_EXPLOSION,
            gradient_layers.LAYER_GRADIENT_EXPLOSION,
            nonfinite.CLIPPING_BEFORE_UNSCALE,
            loop.CLIPPING_AFTER_STEP,
            loop.CLIPPING_WITHOUT_GRADIENTS,
        ),
        look=_clipping,
        remedy="",
        unseen=_SHORT_RUN,
    ),
    ChecklistPoint(
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
            mixed_precision.OVERFLOW_RATIO_HIGH,
            gradient_layers.GRADIENT_UNDERFLOW,
            nonfinite.GRADIENT_NONFINITE,
            nonfinite.NONFINITE_UPDATE,
            loop.GRADIENTS_LEFT_SCALED,
            mixed_precision.FP16_WITHOUT_LOSS_SCALE,
        ),
        look=_loss_scale,
        remedy="Scale the loss by torch.amp.GradScaler, or use BF16.",
        unseen=_SHORT_RUN,
    ),
    ChecklistPoint(
        title="inputs are normalized",
        look=_inputs,
        remedy="Normalize in the data: subtract the mean, divide by the standard deviation.",
        unseen=f"{_SHORT_RUN} It measures the tensors that the model's forward gets in training.",
    ),
    ChecklistPoint(
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
    ChecklistPoint(
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
    ChecklistPoint(
        title="no dimension outweighs the others",
        conditions=(tensors.DIMENSION_IMBALANCE,),
        look=_dimensions,
        remedy="Standardize each feature by itself.",
        unseen="A short run compares the slices of the model's first input, of those given by "
        "name, and of its output, where these are floating-point tensors; others are watched by "
        "mp_agent.watch_tensor with dim.",
    ),
)
