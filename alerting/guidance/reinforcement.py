"""Runbook texts: reinforcement learning."""

from mp_agent.alerting.guidance import panels
from mp_agent.alerting.guidance.record import Guidance

REINFORCEMENT = {
    "MpAgentTrainInferenceMismatch": Guidance(
        harm="Gradients are biased: the reward may rise for a while and then collapse. Critical: "
        "stop, since trainer and sampler are different policies. Warning: investigate within "
        "hours.",
        query='increase(mp_agent_logprobs_mismatch_steps_total{run="RUN"}[1h])',
        reading="On how many steps of the last hour trainer and sampler differed, by level. "
        "mp_agent_logprobs_k3 says by how much, in nats per token: 0 in the same arithmetic, and "
        "little where the two only round differently.",
        causes=(
            "The sampler computes in another precision or with other kernels, or is quantized.",
            "The sampler has older weights: their transfer failed, or rollouts are asynchronous.",
            "Temperature, top-k, top-p or a padding token is applied on one side only.",
            "Log-probabilities and mask are shifted by a token against each other.",
            "A router of experts chooses other experts on the two sides.",
        ),
        false_positives=(
            "Log-probabilities of the trainer after further updates on the same rollouts, as in "
            "later epochs of PPO: report those from before the first update.",
            "A model of a few thousand parameters in tests, whose probabilities jump about.",
        ),
        samples=("compare_logprobs",),
        panels=(panels.LOGPROB_KL, panels.LOGPROB_DELTA, panels.LOGPROB_WEIGHTS),
    ),
}
