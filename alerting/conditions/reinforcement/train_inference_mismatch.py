"""MpAgentTrainInferenceMismatch."""

from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.durations import duration
from mp_agent.alerting.examples.example import Example, Track, flat
from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.expressions.predicates import Compare, Predicate, unless
from mp_agent.alerting.expressions.signals import Count, Limit, Where, limit
from mp_agent.alerting.first_line.triage import Triage
from mp_agent.alerting.severity import Severity

_WINDOW = duration("logprob_window")
_HIGH, _EXTREME = limit("logprob_k3_high"), limit("logprob_k3_extreme")


def _mismatch(bound: Limit) -> Predicate:
    count = Count(
        metric=metrics.LOGPROB_MISMATCH_STEPS, window=_WINDOW, where=(Where("bound", "=", bound),)
    )
    return Compare(count, ">=", limit("logprob_steps"))


def _described(bound: Limit, run: str, count: str) -> str:
    return (
        f"On {count} step(s) of run {run} in the last <logprob_window>, the k3 estimate of the KL "
        f"divergence of sampler and trainer was above <{bound.threshold.name}>, with more than one "
        "token in a thousand off by over <logprob_delta_tail>."
    )


def _track(bound: Limit, *steps: float) -> Track:
    return Track(metrics.LOGPROB_MISMATCH_STEPS, (*flat(0, 10), *steps), {"bound": bound})


_DIFFERENT = Example(
    title="a rollout engine in another precision",
    minutes=16,
    tracks=(_track(_HIGH, 1, 2, 3, 4), _track(_EXTREME, 0)),
    fires={Severity.WARNING: _described(_HIGH, "demo", "4")},
    at=15,
    not_yet=(11,),
)

_OTHER_WEIGHTS = Example(
    title="a rollout engine that has not received the weights",
    minutes=16,
    tracks=(_track(_HIGH, 1, 2, 3, 4), _track(_EXTREME, 1, 2, 3, 4)),
    fires={Severity.CRITICAL: _described(_EXTREME, "demo", "4")},
    at=15,
    not_yet=(11,),
)

_ONCE = Example(
    title="two steps whose rollouts began before the last update",
    minutes=20,
    tracks=(_track(_HIGH, 1, 2), _track(_EXTREME, 1, 2)),
)

_OFF = Example(
    title="a run without reinforcement learning",
    minutes=15,
    without=(metrics.LOGPROB_MISMATCH_STEPS,),
)

TRAIN_INFERENCE_MISMATCH = Condition(
    name="MpAgentTrainInferenceMismatch",
    summary="Trainer and sampler give the same tokens different probabilities.",
    meaning="The policy gradient assumes that the trainer's policy drew the tokens. Where the "
    "sampler's differs, gradients are biased, and such runs collapse after a while.",
    confirm="mp_agent_logprobs_k3 and mp_agent_logprobs_delta_p999, how they have developed, and "
    "mp_agent_logprobs_effective_samples_ratio, the share of the tokens that still counts.",
    remedies=(
        "Use the same precision and the same settings on both sides: dtype, attention kernels, "
        "temperature and top-p, before or after which the engine reports its log-probabilities.",
        "Check that the sampler has the trainer's weights of this step.",
        "Compute in FP16 rather than in BF16 on both sides, which was reported to make the "
        "difference 24 times smaller.",
        "Correct by truncated importance weights, or leave out the tokens that differ most.",
    ),
    why="The same weights give the same probabilities only in the same arithmetic: BF16 keeps 8 "
    "significant bits, FP16 11. Truncated weights bound what single tokens contribute.",
    levels=(
        Level(
            severity=Severity.CRITICAL,
            triage=Triage(
                weights="trained on biased gradients since {since}",
                now="stop, and compare weights and sampling settings of trainer and sampler",
            ),
            when=_mismatch(_EXTREME),
            description=_described(_EXTREME, "{run}", "{value|count}"),
            reason="No delay: it takes logprob_steps steps, which in reinforcement learning are "
            "minutes.",
        ),
        Level(
            severity=Severity.WARNING,
            when=unless(_mismatch(_HIGH), _mismatch(_EXTREME)),
            description=_described(_HIGH, "{run}", "{value|count}"),
            reason="As for the critical level, which replaces it.",
        ),
    ),
    firing=(_DIFFERENT, _OTHER_WEIGHTS),
    quiet=(_ONCE, _OFF),
)
