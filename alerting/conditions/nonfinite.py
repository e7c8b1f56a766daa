"""What to do about NaN and Inf; shared by the conditions of loss and gradients."""

NONFINITE_REMEDIES = (
    "Replay the step with torch.autograd.set_detect_anomaly to find the operation.",
    "Use binary_cross_entropy_with_logits in place of binary_cross_entropy, and FP32 for softmax, "
    "norms, exp, log, pow and large sums.",
    "If one rank only is named, look at that rank's data, then at its hardware (XID, ECC).",
)
WHY_NONFINITE_ENDS = (
    "NaN and Inf come from an overflow, a division by zero or a logarithm of zero, mostly in the "
    "few operations whose results leave FP16's range; FP32 or the fused form keeps them inside."
)
