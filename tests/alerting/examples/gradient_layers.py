"""Examples of alerts on the gradients of single layers: lost, dead, exploding, or never there."""

from mp_agent.alerting.conditions.gradient_layers import (
    _LAYERS_WITHOUT_GRADIENT_TEXT,
    _NAMES,
    _NOTHING_TRAINED_TEXT,
)
from mp_agent.alerting.values import Severity
from mp_agent.catalog.metrics import gradient_layers, training
from tests.alerting.examples.example import Example, Examples, Track, Value, flat, ramp


def _underflowing(share: tuple[Value, ...], *steps: Value) -> tuple[Track, ...]:
    """Return a share of layers by the minute, and over how many steps it has been too large."""
    return (
        Track(gradient_layers.LAYERS_UNDERFLOWING, share),
        Track(gradient_layers.SUSTAINED_STEPS, steps, {"limit": "underflow_layers"}),
    )


_LASTING = (*flat(0, 10), *ramp(0, 60, 20), 0)

_FIFTH = Example(
    title="a fifth of the layers; the alert lasts beyond a sample with fewer",
    minutes=52,
    tracks=(
        *_underflowing((*flat(0, 10), *flat(0.2, 20), 0.01), *_LASTING),
        Track(
            gradient_layers.UNDERFLOWING_LAYER,
            (*flat(None, 10), *flat(1, 20), "stale"),
            {"layer": "blocks.0.attention.query.weight"},
        ),
    ),
    fires={
        Severity.WARNING: "The gradients of 20% of the layers of run demo have far more zeros "
        "than at the start, or lie below FP16's smallest number. Among them: "
        "blocks.0.attention.query.weight."
    },
    at=20,
    not_yet=(12, 50),
)

_GRADIENT_UNDERFLOW_OUTLASTED = Example(
    title="a fifth of the layers for some minutes, directly afterwards",
    minutes=36,
    tracks=_underflowing((*flat(0, 10), *flat(0.2, 20), 0.01), *_LASTING),
    fires={
        Severity.WARNING: "The gradients of 20% of the layers of run demo have far more zeros "
        "than at the start, or lie below FP16's smallest number."
    },
    at=36,
)

_GRADIENT_UNDERFLOW_FEW = Example(
    title="two layers of a hundred",
    minutes=20,
    tracks=(Track(gradient_layers.LAYERS_UNDERFLOWING, (0.02,)),),
)

_ONE_LOOK = Example(
    title="a single sample of an unusual batch",
    minutes=20,
    tracks=_underflowing((*flat(0, 10), *flat(0.2, 3), 0), *flat(0, 14)),
)

_BASELINE = Example(
    title="unused embedding rows and ReLU zeros, which are in the layers' baseline",
    minutes=20,
    tracks=(Track(gradient_layers.LAYERS_UNDERFLOWING, (0,)),),
)

_HUNG = Example(
    title="a run that hung after a single sample of an unusual batch",
    minutes=18,
    tracks=_underflowing((*flat(0, 9), 0.2), 0),
)


def _layer_gradient_dead_named(*layers: str) -> tuple[Track, ...]:
    return tuple(
        Track(
            gradient_layers.DEAD_LAYER, (*flat(None, 10), *flat(1, 20), "stale"), {"layer": layer}
        )
        for layer in layers
    )


_TWO_LAYERS = Example(
    title="two layers with dead gradients; the alert lasts beyond a sample that finds them alive",
    minutes=46,
    tracks=(
        Track(gradient_layers.LAYERS_DEAD, (*flat(0, 10), *flat(2, 20), 0)),
        *_layer_gradient_dead_named("blocks.0.mlp.up.weight", "blocks.1.mlp.up.weight"),
    ),
    fires={
        Severity.WARNING: "2 layer(s) of run demo had almost no gradient in the last "
        "<layer_dead_samples> samples. Among them: blocks.0.mlp.up.weight, "
        "blocks.1.mlp.up.weight."
    },
    at=29,
    not_yet=(9, 45),
)

_LAYER_GRADIENT_DEAD_OUTLASTED = Example(
    title="a layer that was dead for some minutes, directly afterwards",
    minutes=36,
    tracks=(Track(gradient_layers.LAYERS_DEAD, (*flat(0, 10), *flat(1, 20), 0)),),
    fires={
        Severity.WARNING: "1 layer(s) of run demo had almost no gradient in the last "
        "<layer_dead_samples> samples."
    },
    at=35,
)

_LAYER_GRADIENT_DEAD_NONE = Example(
    title="frozen, unused and idle parameters, which are not counted",
    minutes=15,
    tracks=(Track(gradient_layers.LAYERS_DEAD, (0,)),),
)

_LAYER_GRADIENT_DEAD_NOT_LOOKED_AT = Example(
    title="a run whose layers were never sampled",
    minutes=15,
    without=(gradient_layers.LAYERS_DEAD,),
)


_NAMED = (
    "1 layer(s) of run demo had a gradient norm of more than <layer_growth> times their usual one "
    "in the last <layer_dead_samples> samples, while most layers had not."
)

_ONE_LAYER = Example(
    title="one layer that explodes while the norm of the whole model stays small",
    minutes=46,
    tracks=(
        Track(gradient_layers.LAYERS_EXPLODING, (*flat(0, 10), *flat(1, 20), 0)),
        Track(
            gradient_layers.EXPLODING_LAYER,
            (*flat(None, 10), *flat(1, 20), "stale"),
            {"layer": "blocks.4.attention.out.weight"},
        ),
    ),
    fires={Severity.WARNING: f"{_NAMED} Among them: blocks.4.attention.out.weight."},
    at=29,
    not_yet=(9, 45),
)

_LAYER_GRADIENT_EXPLOSION_OUTLASTED = Example(
    title="a layer that exploded for some minutes, directly afterwards",
    minutes=36,
    tracks=(Track(gradient_layers.LAYERS_EXPLODING, (*flat(0, 10), *flat(1, 20), 0)),),
    fires={Severity.WARNING: _NAMED},
    at=35,
)

_LAYER_GRADIENT_EXPLOSION_NONE = Example(
    title="layers that all grow, which are not counted",
    minutes=15,
    tracks=(Track(gradient_layers.LAYERS_EXPLODING, (0,)),),
)


_FILLED = _LAYERS_WITHOUT_GRADIENT_TEXT.removesuffix(_NAMES).replace("{run}", "demo")


def _layers_without_gradient_named(*layers: str) -> tuple[Track, ...]:
    return tuple(
        Track(gradient_layers.LAYER_WITHOUT_GRADIENT, (*flat(None, 5), 1), {"layer": layer})
        for layer in layers
    )


_ADAPTERS = Example(
    title="adapters behind reentrant checkpointing, whose inputs need no gradient",
    minutes=15,
    tracks=(
        Track(gradient_layers.LAYERS_WITHOUT_GRADIENT, (*flat(None, 5), 0.8)),
        *_layers_without_gradient_named("blocks.0.lora_A.weight", "blocks.0.lora_B.weight"),
    ),
    fires={
        Severity.WARNING: _FILLED.replace("{value|percent}", "80%")
        + " Among them: blocks.0.lora_A.weight, blocks.0.lora_B.weight."
    },
    at=8,
    not_yet=(4,),
)

_COPY = Example(
    title="an optimizer that holds the parameters of another copy of the model",
    minutes=15,
    tracks=(Track(gradient_layers.LAYERS_WITHOUT_GRADIENT, (*flat(None, 5), 1)),),
    fires={Severity.WARNING: _FILLED.replace("{value|percent}", "100%")},
    at=8,
    not_yet=(4,),
)

_HEAD = Example(
    title="a head that no step uses",
    minutes=15,
    tracks=(
        Track(gradient_layers.LAYERS_WITHOUT_GRADIENT, (*flat(None, 5), 0.04)),
        *_layers_without_gradient_named("head.auxiliary.weight"),
    ),
    fires={
        Severity.INFO: _FILLED.replace("{value|percent}", "4%")
        + " Among them: head.auxiliary.weight."
    },
    at=8,
    not_yet=(4,),
)

_ALL = Example(
    title="frozen parameters and idle experts, which are not counted",
    minutes=15,
    tracks=(Track(gradient_layers.LAYERS_WITHOUT_GRADIENT, (0,)),),
)

_LAYERS_WITHOUT_GRADIENT_NOT_LOOKED_AT = Example(
    title="a run whose layers were never sampled",
    minutes=15,
    without=(gradient_layers.LAYERS_WITHOUT_GRADIENT,),
)


def _example(title: str, reason: str, severity: Severity, *, not_yet_minute: int = 7) -> Example:
    text = _NOTHING_TRAINED_TEXT.replace("{run}", "demo").replace("{reason}", reason)
    counts = (*flat(None, 5), *ramp(60, 60, 30), "stale")
    certain = severity is Severity.CRITICAL
    return Example(
        title=title,
        minutes=40,
        tracks=(Track(training.UNTRAINED_STEPS, counts, {"reason": reason}),),
        fires={severity: text.replace("{value|count}", "1800")},
        labels={"reason": reason},
        at=34,
        not_yet=(4 if certain else not_yet_minute, 40),
    )


_ZEROS = _example(
    "a loss and gradients that are exactly 0 at every step", "all gradients 0", Severity.CRITICAL
)

_ZERO_LOSS = _example(
    "a loss of exactly 0 whose gradients are not finite",
    "loss 0 with non-finite gradients",
    Severity.CRITICAL,
)

_CUT = _example(
    "a loss that is exactly 0 from one step to the next, without gradient norms",
    "loss 0 at once",
    Severity.CRITICAL,
)

_ZERO_RATE = _example(
    "a learning rate that has decayed to 0 while steps go on", "learning rate 0", Severity.WARNING
)

_ZERO_RATES = _example(
    "learning rates that are all 0", "all learning rates 0", Severity.WARNING, not_yet_minute=4
)

_CONSTANT = _example("a loss that is the same on every step", "constant loss", Severity.WARNING)

_NO_GRADIENTS = _example("optimizer steps without any gradient", "no gradients", Severity.WARNING)

_VANISHED = _example(
    "a loss that was above 0 and is exactly 0 on every step", "loss 0", Severity.WARNING
)

_SAME = _example(
    "a loss and a gradient norm that are the same on every step",
    "constant loss and gradient norm",
    Severity.WARNING,
)

_CLIPPED = _example(
    "clipping to a norm of 1e-8, while the loss does not fall",
    "gradients clipped to almost 0",
    Severity.WARNING,
)

_NOTHING_TRAINED_FEW = Example(
    title="a few steps at learning rate 0, as at both ends of a schedule",
    minutes=12,
    tracks=(
        Track(training.UNTRAINED_STEPS, (1, 2, 3, "stale"), {"reason": "learning rate 0"}),
        Track(training.UNTRAINED_STEPS, (1, 2, 3, "stale"), {"reason": "all learning rates 0"}),
        Track(training.UNTRAINED_STEPS, (1, 2, 3, "stale"), {"reason": "all gradients 0"}),
    ),
)

_ROUNDED = Example(
    title="a rounded loss that is constant for some time",
    minutes=30,
    tracks=(
        Track(training.UNTRAINED_STEPS, (*ramp(10, 16, 29), "stale"), {"reason": "constant loss"}),
    ),
)


EXAMPLES = {
    "MpAgentGradientUnderflow": Examples(
        firing=(_FIFTH, _GRADIENT_UNDERFLOW_OUTLASTED),
        quiet=(_GRADIENT_UNDERFLOW_FEW, _ONE_LOOK, _BASELINE, _HUNG),
    ),
    "MpAgentLayerGradientDead": Examples(
        firing=(_TWO_LAYERS, _LAYER_GRADIENT_DEAD_OUTLASTED),
        quiet=(_LAYER_GRADIENT_DEAD_NONE, _LAYER_GRADIENT_DEAD_NOT_LOOKED_AT),
    ),
    "MpAgentLayerGradientExplosion": Examples(
        firing=(_ONE_LAYER, _LAYER_GRADIENT_EXPLOSION_OUTLASTED),
        quiet=(_LAYER_GRADIENT_EXPLOSION_NONE,),
    ),
    "MpAgentLayersWithoutGradient": Examples(
        firing=(_ADAPTERS, _COPY, _HEAD),
        quiet=(_ALL, _LAYERS_WITHOUT_GRADIENT_NOT_LOOKED_AT),
    ),
    "MpAgentNothingTrained": Examples(
        firing=(
            _ZEROS,
            _ZERO_LOSS,
            _CUT,
            _ZERO_RATE,
            _ZERO_RATES,
            _CONSTANT,
            _NO_GRADIENTS,
            _VANISHED,
            _SAME,
            _CLIPPED,
        ),
        quiet=(_NOTHING_TRAINED_FEW, _ROUNDED),
    ),
}
