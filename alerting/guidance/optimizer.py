"""Runbook texts: the optimizer."""

from mp_agent.alerting.guidance import panels
from mp_agent.alerting.guidance.record import Guidance

OPTIMIZER = {
    "MpAgentSecondMomentStale": Guidance(
        harm="No damage yet, but each update is larger than intended, and the loss may spike "
        "within a few steps. Look during working hours, at once if the loss rises.",
        query='last_over_time(mp_agent_moment_stale_layer_info{run="RUN"}[15m])',
        reading="The layers in which gradients have outgrown the second moment; "
        "mp_agent_layer_moment_rms says by which factor. Values near 1 are healthy.",
        causes=(
            "The data changed: another source, another sequence length, a batch that was not "
            "shuffled.",
            "beta2 is close to 1, such as 0.999, and the gradients' scale drifts faster.",
            "A layer that was nearly idle receives gradients again, such as rare embeddings.",
            "Gradients begin to explode, for which the learning rate is too high.",
        ),
        false_positives=(
            "A schedule that unfreezes layers or changes the loss on purpose: it heals within "
            "about 1/(1 - beta2) steps.",
        ),
        samples=("faster_second_moment",),
        panels=(panels.SECOND_MOMENT, panels.UPDATE_SIZE, panels.LOSS),
    ),
    "MpAgentUpdatesLost": Guidance(
        harm="The run goes on and learns less than it could, or nothing. Investigate during "
        "working hours; the computing time until then is largely wasted.",
        query='mp_agent_updates_lost_ratio{run="RUN"}',
        reading="The share of the weights in at most 16 bits that the last sampled step was to "
        "change and did not. It grows as the learning rate decays.",
        causes=(
            "The model was cast to BF16 or FP16 as a whole, so that the optimizer steps 16-bit "
            "weights without an FP32 copy.",
            "The learning rate is small for the spacing of the weights' format.",
        ),
        false_positives=(
            "The first steps of a warm-up, whose learning rate is almost 0.",
            "An optimizer that carries the rounding error along: the weights change later.",
        ),
        samples=("master_weights",),
        panels=(panels.ROUNDED_UPDATES, panels.UPDATE_SIZE, panels.LEARNING_RATE),
    ),
    "MpAgentAdamEpsilonUnsafe": Guidance(
        harm="Updates are far smaller than intended, or at risk of becoming infinite. Look during "
        "working hours; at once where the state is in FP16.",
        query='mp_agent_adam_below_epsilon_ratio{run="RUN"} or '
        'mp_agent_adam_epsilon_lost_ratio{run="RUN"}',
        reading="The first is the share of elements whose second moment is below epsilon; the "
        "second is the share whose state's format cannot hold epsilon, 0 or 1 in most runs.",
        causes=(
            "The optimizer's state is in FP16, because the model was cast by half().",
            "A loss that is divided by a large constant, so that all gradients are tiny.",
            "An epsilon that was raised to stabilize another run.",
        ),
        false_positives=(
            "A large epsilon on purpose, which turns Adam into a damped gradient descent.",
            "A converged run, whose gradients have all become tiny.",
        ),
        samples=("safe_epsilon",),
        panels=(panels.ADAM_EPSILON, panels.GRADIENT_NORM),
    ),
}
