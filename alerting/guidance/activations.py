"""Runbook texts: outputs of modules."""

from mp_agent.alerting.guidance import panels
from mp_agent.alerting.guidance.record import Guidance

ACTIVATIONS = {
    "MpAgentActivationNonFinite": Guidance(
        harm="Critical: without a scaler the weights are damaged at the same step; with one, "
        "steps are skipped and nothing is learned. Act immediately.",
        query='mp_agent_activation_first_nonfinite_info{run="RUN"}',
        reading="The module that was the first of a forward pass to return NaN or Inf, and the "
        "step of the sample that showed it. Sampled are the steps on which layers are measured, "
        "and those after trouble.",
        causes=(
            "The module's output overflows FP16: its magnitude grew over the steps before.",
            "Weights that an earlier step made NaN: then the first module with weights is named.",
            "A division by zero, a logarithm of zero or a root of a negative number in it.",
            "Corrupt input data: then the first module of the model is named.",
        ),
        false_positives=(
            "A module that returns -Inf on purpose, such as one that applies an attention mask: "
            "add the mask in a function instead, or set measure_activations to False.",
        ),
        samples=("overflowing_layer", "find_the_operation"),
        panels=(panels.ACTIVATIONS_NONFINITE, panels.ACTIVATIONS, panels.NONFINITE_ELEMENTS),
    ),
    "MpAgentActivationNearOverflow": Guidance(
        harm="Nothing is lost yet; a slightly larger output overflows and its step is lost. "
        "Investigate within hours.",
        query='increase(mp_agent_activation_near_overflow_elements_total{run="RUN"}[10m])',
        reading="The elements of the last ten minutes, of the steps that were sampled. "
        "mp_agent_layer_activation_abs_max shows the modules with the largest outputs.",
        causes=(
            "Residual streams that grow with depth and with training, without normalization.",
            "Attention logits or output logits that grow, as with a learning rate too high.",
            "Sums over many elements in FP16, such as a mean over a long sequence.",
        ),
        false_positives=("Outputs that are large by design and bounded, such as masks of -65504.",),
        samples=("overflowing_layer", "stable_operations"),
        panels=(panels.ACTIVATIONS_NONFINITE, panels.ACTIVATIONS),
    ),
}
