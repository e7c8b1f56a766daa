"""Limits of the difference between trainer and sampler."""

from mp_agent.catalog.thresholds.threshold import Threshold

REINFORCEMENT_THRESHOLDS = (
    Threshold(
        name="logprob_k3_high",
        value=0.01,
        unit="{nat}",
        meaning="k3 estimate of the KL divergence of sampler and trainer that rounding in 16 bits "
        "alone seldom reaches",
        below="logprob_k3_extreme",
    ),
    Threshold(
        name="logprob_k3_extreme",
        value=0.1,
        unit="{nat}",
        meaning="k3 estimate at which sampler and trainer are different policies",
    ),
    Threshold(
        name="logprob_delta_tail",
        value=0.1,
        unit="{nat}",
        meaning="difference of the log-probabilities that one token in a thousand must exceed: a "
        "k3 estimate of a few extreme tokens alone is not judged",
    ),
    Threshold(
        name="logprob_steps",
        value=3.0,
        unit="{step}",
        meaning="steps within logprob_window on which trainer and sampler must differ",
    ),
)
