"""What a policy of the guard is: its action, and its parameters with their bounds."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from math import inf, isfinite
from typing import TypeAlias, TypeGuard

Values: TypeAlias = Mapping[str, float | str]
"""Parameters of one policy, by name."""


DRY_RUN = 0.5
"""Value of an action's column on a step on which it would have been done but for a dry run."""


class Action(Enum):
    """What the guard does; the value is the label `action` of its metric."""

    SKIP_UPDATE = "skip_update"
    CLIP_GRADIENTS = "clip_gradients"
    LOWER_LEARNING_RATE = "lower_learning_rate"
    RAISE_LOSS_SCALE = "raise_loss_scale"
    RESET_LOSS_SCALE = "reset_loss_scale"
    WIDEN_PRECISION = "widen_precision"
    REQUEST_CHECKPOINT = "request_checkpoint"
    REQUEST_STOP = "request_stop"
    NONE_LEFT = "none_left"
    """A policy was to act, and had already acted `actions_max` times lately: nothing was done."""

    @property
    def column(self) -> str:
        """The column of a step's record that says whether this was done."""
        return f"guard_{self.value}"


def _is_finite_number(value: object) -> TypeGuard[int | float]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return isfinite(value)
    except OverflowError:  # an int beyond float64
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A number, or a text, by which a policy can be adapted."""

    name: str
    default: float | str
    meaning: str
    minimum: float = -inf
    maximum: float = inf
    whole: bool = False
    choices: tuple[str, ...] = ()

    def problem(self, value: object) -> str | None:
        """Return what is wrong with a value for it, or None."""
        if isinstance(self.default, str):
            if not isinstance(value, str) or not value.strip():
                return "must be a text"
            if self.choices and value not in self.choices:
                return f"must be one of {', '.join(self.choices)}"
            return None
        if not _is_finite_number(value):
            return "must be a finite number"
        if value < self.minimum:
            return f"must be at least {self.minimum:g}"
        if value > self.maximum:
            return f"must be at most {self.maximum:g}"
        if self.whole and value != int(value):
            return "must be a whole number"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """One thing that the guard does, and when."""

    name: str
    action: Action
    when: str
    """What sets it off, and what is done then: a sentence for the documents."""
    parameters: tuple[Parameter, ...]
    by_default: bool = False
    """Whether `guard=True` includes it."""

    @property
    def defaults(self) -> dict[str, float | str]:
        """The values of the parameters that are not given."""
        return {parameter.name: parameter.default for parameter in self.parameters}
