"""Reinforcement learning: trainer against sampler, where their log-probabilities are reported."""

from grafana.panel import Panel, Query, Row, above, help_of
from grafana.queries import by_run, increase
from mp_agent.alerting.conditions.tensors import POLICY_ENTROPY_COLLAPSED, TRAIN_INFERENCE_MISMATCH

_NOTHING = "Not reported"
_RUNBOOKS = (TRAIN_INFERENCE_MISMATCH,)

REINFORCEMENT = Row(
    title="Reinforcement learning",
    panels=(
        Panel(
            id=80,
            title="Divergence of sampler and trainer",
            description=help_of("mp_agent_logprobs_k3")
            + " The k1 estimate is negative at times. Needs calls of mp_agent.observe_logprobs.",
            unit="sci",
            decimals=1,
            nothing=_NOTHING,
            lines=True,
            steps=above(logprob_k3_high="orange", logprob_k3_extreme="red"),
            queries=(
                Query(by_run("mp_agent_logprobs_k3"), "k3", optional=True),
                Query(by_run("mp_agent_logprobs_k1"), "k1", optional=True),
            ),
            runbooks=_RUNBOOKS,
        ),
        Panel(
            id=85,
            title="Entropy of the policy",
            description=help_of("mp_agent_policy_entropy"),
            nothing=_NOTHING,
            lines=True,
            queries=(Query(by_run("mp_agent_policy_entropy"), "nats per token", optional=True),),
            runbooks=(POLICY_ENTROPY_COLLAPSED,),
        ),
        Panel(
            id=81,
            title="Difference of log-probabilities",
            description="Largest and 99.9th percentile of the magnitude of the difference of a "
            "token's log-probabilities by trainer and sampler. A tail that grows comes before the "
            "mean does.",
            log_base=10,
            many_decades=True,
            nothing=_NOTHING,
            queries=(
                Query(by_run("mp_agent_logprobs_delta_max"), "largest", optional=True),
                Query(by_run("mp_agent_logprobs_delta_p999"), "99.9th percentile", optional=True),
            ),
            runbooks=_RUNBOOKS,
        ),
        Panel(
            id=82,
            title="Effective sample size",
            description="Effective sample size of the importance weights as a share of the tokens: "
            "close to 1 where trainer and sampler agree.",
            unit="percentunit",
            maximum=1,
            nothing=_NOTHING,
            queries=(
                Query(
                    by_run("mp_agent_logprobs_effective_samples_ratio"),
                    "effective samples",
                    optional=True,
                ),
            ),
            runbooks=_RUNBOOKS,
        ),
        Panel(
            id=84,
            title="Correlation of log-probabilities",
            description="Correlation of the trainer's log-probabilities with the sampler's: close "
            "to 1 where they agree.",
            maximum=1,
            nothing=_NOTHING,
            queries=(Query(by_run("mp_agent_logprobs_correlation"), "correlation", optional=True),),
            runbooks=_RUNBOOKS,
        ),
        Panel(
            id=83,
            title="Tokens left out of the comparison",
            description="Tokens of which a log-probability is not finite, those with an importance "
            "weight beyond exp(300), and calls whose arguments could not be compared.",
            minimum=0,
            soft_maximum=1,
            queries=(
                Query(increase("mp_agent_logprobs_nonfinite_tokens_total"), "not finite"),
                Query(increase("mp_agent_logprobs_clipped_tokens_total"), "weight cut off"),
                Query(increase("mp_agent_logprobs_refused_calls_total"), "refused calls"),
            ),
        ),
    ),
)
