"""The policies of the guard, a record each."""

from collections.abc import Mapping

from mp_agent.catalog.guard.policy import Action, Parameter, Policy


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
