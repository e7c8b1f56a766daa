"""Which column of a log holds which quantity, and the numbers in it."""

import re
from collections.abc import Iterable, Mapping
from math import inf
from typing import Any

from mp_agent.errors import LogError, NothingToJudge

Row = tuple[int, Mapping[str, Any]]
"""Number of the line or entry, from 1, and the values by column."""

STEP = "step"
QUANTITIES: Mapping[str, tuple[str, ...]] = {
    STEP: (
        "step",
        "global_step",
        "steps",
        "_step",
        "iteration",
        "iter",
        "num_updates",
        "update_step",
        "current_steps",
        "updates",
        "global_step_max_steps",
    ),
    "loss": (
        "loss",
        "train_loss",
        "training_loss",
        "lm_loss",
        "loss_step",
        "train_loss_step",
        "total_loss",
        "losses",
        "reduced_train_loss",
        "crossentropyloss",
        "loss_train",
        "loss_train_total",
        "avr_loss",
        "main_loss",
        "step_loss",
        "batch_loss",
        "avg_loss",
        "average_loss",
        "mean_loss",
        "loss_total",
        "loss_epoch",
        "train_loss_epoch",
        "epoch_loss",
    ),
    "grad_norm": (
        "grad_norm",
        "gnorm",
        "gradient_norm",
        "global_grad_norm",
        "total_grad_norm",
        "grad_norm_step",
        "grad_2_0_norm_total",
        "grad_2_norm_total",
        "l2_norm_grad_global",
        "actor_grad_norm",
        "grdn",
        "norm",
    ),
    "learning_rate": (
        "learning_rate",
        "lr",
        "lr_0",
        "lr_adamw",
        "lr_adam",
        "lr_sgd",
        "lr_pg0",
        "lr_pg1",
        "x_lr0",
        "cur_lr",
        "optim0_lr0",
        "actor_lr",
        "lr_decoupledadamw_group0",
    ),
    "loss_scale": ("loss_scale", "grad_scale", "scaler_scale", "loss_scaler", "scale", "scaler"),
    "loss_scale_log2": ("lg_loss_scale", "log2_loss_scale", "loss_scale_log2"),
    "skipped": ("skipped", "skipped_step", "overflow"),
    "skipped_since": ("skipped_since_last",),
    "skipped_cumulative": ("skipped_cumulative", "skipped_steps", "skipped_steps_total"),
    "time": (
        "_timestamp",
        "timestamp",
        "wall_time",
        "time_unix",
        "_runtime",
        "wall",
        "created_at",
        "elapsed_time",
    ),
    "step_seconds": (
        "step_seconds",
        "seconds_per_step",
        "step_time",
        "iteration_time",
        "iter_time",
    ),
}
"""Quantity → names of its column once they are `plain`, the most common first."""

NUMBERS = (
    "loss",
    "grad_norm",
    "loss_scale",
    "loss_scale_log2",
    "skipped",
    "skipped_since",
    "skipped_cumulative",
)
"""A log without any of these has nothing to judge."""

_PREFIX = re.compile(
    r"^(?:train|training|trainer|optim|optimizer|metrics|stats|info/learner/[^/]+/learner_stats)[/.]"
)
_OF_TRAINING = ("train_", "training_")
_PART = re.compile(r"^train/\w+_loss$")
_PARTS_OF_DETECTION = ("train/box_loss", "train/giou_loss")
_SEPARATORS = re.compile(r"[^a-z0-9]+")
_LIKELY = re.compile(r"loss|norm|scale", re.IGNORECASE)
_ABSENT = frozenset(("", "none", "null", "n/a", "-"))


def plain(name: str) -> str:
    """Return a column's name in lower case, without a prefix such as `train/`."""
    bare = _PREFIX.sub("", name.strip().lower())
    leading = "_" if bare.startswith("_") else ""
    return leading + _SEPARATORS.sub("_", bare).strip("_")


def choose_columns(names: Iterable[str], chosen: Mapping[str, str]) -> dict[str, str]:
    """Return quantity → column, for the names of a log's columns; `chosen` ones come first.

    Raises LogError, naming it, for a chosen column that the log does not have, and NothingToJudge.
    """
    names = list(dict.fromkeys(names))
    found: dict[str, str] = {}
    for quantity, column in chosen.items():
        if column not in names:
            raise LogError(
                f"column {column!r} for {quantity} is not there; columns: {_listed(names)}"
            )
        found[quantity] = column
    by_plain: dict[str, str] = {}
    for name in sorted(names, key=len):
        by_plain.setdefault(plain(name), name)
    for known, name in list(by_plain.items()):
        for prefix in _OF_TRAINING:
            by_plain.setdefault(known.removeprefix(prefix), name)
    for quantity, candidates in QUANTITIES.items():
        likely = next((by_plain[name] for name in candidates if name in by_plain), None)
        if quantity not in found and likely is not None and likely not in found.values():
            found[quantity] = likely
    if not any(quantity in found for quantity in NUMBERS):
        raise NothingToJudge(
            f"no loss, gradient norm or loss scale; columns: {_listed(names)}; name one by "
            "--column loss=NAME"
        )
    return found


def parts_of_loss(names: Iterable[str]) -> tuple[str, ...]:
    """Return the columns whose sum is the loss, as Ultralytics writes them; else none.

    Of parts in general it is not known: those of an actor and a critic have no sum that is trained.
    """
    parts = tuple(dict.fromkeys(name for name in names if _PART.match(name)))
    return parts if any(name in parts for name in _PARTS_OF_DETECTION) else ()


def number(value: object) -> float | None:
    """Return a logged value as a number; None where nothing was logged.

    NaN and Inf are numbers, however they are written. Raises ValueError for what is no number.
    """
    if value is None:
        return None
    if isinstance(value, (int, float)):
        try:
            return float(value)
        except OverflowError:
            return inf if value > 0 else -inf
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            if value.strip().lower() in _ABSENT:
                return None
            raise
    raise ValueError(f"{type(value).__name__} is no number")


def _listed(names: list[str]) -> str:
    if len(names) <= 20:
        return ", ".join(names) or "none"
    likely = sorted(names, key=lambda name: _LIKELY.search(name) is None)
    return f"{', '.join(likely[:20])}, … ({len(names)} in all)"
