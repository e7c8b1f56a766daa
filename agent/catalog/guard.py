"""The policies of the guard: actions, parameters with their bounds, and what contradicts.

The policies of the guard: what sets each off, what it does, and its parameters.
Settings check names and values against these records, the probe acts by them, and the documents
are generated from them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from math import inf, isfinite
from typing import TypeAlias, TypeGuard

from mp_agent.errors import CatalogError, unknown_name

Values: TypeAlias = Mapping[str, float | str]
"""Parameters of one policy, by name."""


DRY_RUN = 0.5
"""Value of an action's column on a step on which it would have been done but for a dry run."""


class Action(Enum):
    """What the guard does; the value is the label `action` of its metric."""

    SKIP_UPDATE = "skip_update"
    CLIP_GRADIENTS = "clip_gradients"
    HOLD_LEARNING_RATE = "hold_learning_rate"
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


def _limits(actions_max: int, window_steps: int) -> tuple[Parameter, ...]:
    return (
        Parameter(
            name="actions_max",
            default=float(actions_max),
            meaning="how often it acts at most within `window_steps`",
            minimum=1,
            maximum=10_000,
            whole=True,
        ),
        Parameter(
            name="window_steps",
            default=float(window_steps),
            meaning="steps in which it acts at most `actions_max` times",
            minimum=1,
            whole=True,
        ),
    )


def _spike(z: float, factor: float) -> tuple[Parameter, ...]:
    return (
        Parameter(
            name="z",
            default=z,
            meaning="standard deviations of the logarithm above its mean from which a norm is a "
            "spike",
            minimum=0,
        ),
        Parameter(
            name="factor",
            default=factor,
            meaning="how many times the usual norm a spike is at least",
            minimum=1,
        ),
        Parameter(
            name="warmup_steps",
            default=20.0,
            meaning="steps from which the usual norm is learned before anything is a spike",
            minimum=2,
            whole=True,
        ),
        Parameter(
            name="memory_steps",
            default=50.0,
            meaning="steps over which the mean and the deviation are averaged, exponentially",
            minimum=2,
            whole=True,
        ),
    )


def _troubles(count: int, within: int) -> tuple[Parameter, ...]:
    return (
        Parameter(
            name="troubles",
            default=float(count),
            meaning="troubled steps within `trouble_steps` that set it off",
            minimum=1,
            whole=True,
        ),
        Parameter(
            name="trouble_steps",
            default=float(within),
            meaning="steps within which troubled ones are counted",
            minimum=1,
            whole=True,
        ),
    )


POLICIES: tuple[Policy, ...] = (
    Policy(
        name="skip_nonfinite",
        action=Action.SKIP_UPDATE,
        when="Gradients that the optimizer is about to use are NaN or Inf on any rank: no rank "
        "updates its weights.",
        parameters=_limits(10, 100),
        by_default=True,
    ),
    Policy(
        name="clip_spikes",
        action=Action.CLIP_GRADIENTS,
        when="The gradient norm is a spike: all gradients are scaled down to the usual norm.",
        parameters=(*_spike(5.0, 4.0), *_limits(20, 100)),
        by_default=True,
    ),
    Policy(
        name="skip_spikes",
        action=Action.SKIP_UPDATE,
        when="The gradient norm is a spike: no rank updates its weights.",
        parameters=(*_spike(8.0, 20.0), *_limits(10, 100)),
    ),
    Policy(
        name="hold_learning_rate",
        action=Action.HOLD_LEARNING_RATE,
        when="The learning rate of a parameter group is NaN, or above `factor` times the highest "
        "that it had before, and above what its schedule has begun with or rises to (`initial_lr`, "
        "`max_lr`): the update is made with the highest rate before.",
        parameters=(
            Parameter(
                name="factor",
                default=20.0,
                meaning="how many times the highest rate before a rate is at least that is held",
                minimum=1,
            ),
            Parameter(
                name="warmup_steps",
                default=20.0,
                meaning="updates of a group with a rate above 0 before any rate is held",
                minimum=1,
                whole=True,
            ),
            *_limits(20, 1000),
        ),
        by_default=True,
    ),
    Policy(
        name="lower_learning_rate",
        action=Action.LOWER_LEARNING_RATE,
        when="Trouble repeats: updates are made with the learning rate times `rate_factor` for "
        "`hold_steps`, and then with more and more of it for as many steps.",
        parameters=(
            *_troubles(3, 50),
            Parameter(
                name="rate_factor",
                default=0.1,
                meaning="factor of the learning rate",
                minimum=0,
                maximum=1,
            ),
            Parameter(
                name="hold_steps",
                default=50.0,
                meaning="steps at the lowered rate, and steps in which it comes back",
                minimum=1,
                whole=True,
            ),
            *_limits(3, 1000),
        ),
    ),
    Policy(
        name="raise_loss_scale",
        action=Action.RAISE_LOSS_SCALE,
        when="GradScaler lowers its scale below `floor`: the scale is set to `floor`.",
        parameters=(
            Parameter(
                name="floor",
                default=128.0,
                meaning="lowest loss scale",
                minimum=2.0**-126,
                maximum=2.0**126,
            ),
            *_limits(20, 1000),
        ),
    ),
    Policy(
        name="reset_loss_scale",
        action=Action.RESET_LOSS_SCALE,
        when="GradScaler's scale has fallen to 1/`fall_factor` or less of the last one that held "
        "for `calm_steps`, and there was no trouble for `calm_steps`: the scale is set back to "
        "the one that held.",
        parameters=(
            Parameter(
                name="fall_factor",
                default=16.0,
                meaning="by what factor the scale has fallen at least",
                minimum=2,
                maximum=2.0**126,
            ),
            Parameter(
                name="calm_steps",
                default=100.0,
                meaning="steps in a row without trouble after which a scale has held, or a fall "
                "is over",
                minimum=1,
                whole=True,
            ),
            *_limits(3, 2000),
        ),
    ),
    Policy(
        name="widen_precision",
        action=Action.WIDEN_PRECISION,
        when="Trouble repeats: the named modules compute in `dtype` for `hold_steps`.",
        parameters=(
            *_troubles(3, 50),
            Parameter(
                name="modules",
                default="*",
                meaning="names of modules, with wildcards, separated by spaces; * is the model",
            ),
            Parameter(
                name="dtype",
                default="fp32",
                meaning="fp32: without autocast; bf16: with autocast to it",
                choices=("fp32", "bf16"),
            ),
            Parameter(
                name="hold_steps",
                default=200.0,
                meaning="steps without trouble after which they compute as before",
                minimum=1,
                whole=True,
            ),
            *_limits(3, 2000),
        ),
    ),
    Policy(
        name="request_checkpoint",
        action=Action.REQUEST_CHECKPOINT,
        when="Trouble repeats: the callbacks of `mp_agent.on_checkpoint_request` are called, and "
        "`mp_agent.checkpoint_requested()` is True once.",
        parameters=(*_troubles(3, 50), *_limits(1, 500)),
    ),
    Policy(
        name="request_stop",
        action=Action.REQUEST_STOP,
        when="Trouble keeps on, or `skip_nonfinite` has acted as often as it may: "
        "`mp_agent.stop_requested()` is True from then on.",
        parameters=(*_troubles(25, 50), *_limits(1, 1000)),
    ),
)
"""All of them, in the order in which they are asked."""

POLICIES_BY_NAME: Mapping[str, Policy] = {policy.name: policy for policy in POLICIES}


def with_defaults(given: Mapping[str, Values]) -> dict[str, dict[str, float | str]]:
    """Return policies with all their parameters, in the order of `POLICIES`.

    Raises CatalogError, naming the policy and the parameter, for what is unknown or wrong.
    """
    for name, values in given.items():
        for problem in _problems(name, values):
            raise CatalogError(problem)
    return {
        policy.name: {**policy.defaults, **given[policy.name]}
        for policy in POLICIES
        if policy.name in given
    }


def default_policies() -> dict[str, dict[str, float | str]]:
    """Return what `guard=True` stands for."""
    return with_defaults({policy.name: {} for policy in POLICIES if policy.by_default})


def _problems(name: str, values: Values) -> Iterator[str]:
    policy = POLICIES_BY_NAME.get(name)
    if policy is None:
        yield unknown_name(name, POLICIES_BY_NAME)
        return
    if not isinstance(values, Mapping):
        yield f"{name} is {values!r}: must be a table of parameters"
        return
    parameters = {parameter.name: parameter for parameter in policy.parameters}
    for key, value in values.items():
        if key not in parameters:
            yield f"{name} has no {key!r}; it has: {', '.join(parameters)}"
        elif problem := parameters[key].problem(value):
            yield f"{name}.{key} is {value!r}: {problem}"
    counts = {**policy.defaults, **values}
    if "troubles" in counts and float(counts["troubles"]) > float(counts["trouble_steps"]):
        yield (
            f"{name}.troubles is {counts['troubles']}, {name}.trouble_steps is "
            f"{counts['trouble_steps']}: there are never so many within so few steps"
        )
