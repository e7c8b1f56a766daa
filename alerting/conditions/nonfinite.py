"""What to do about NaN and Inf; shared by the conditions of loss and gradients."""

NONFINITE_REMEDIES = (
    "Replay the step with torch.autograd.set_detect_anomaly to find the operation.",
    "Use binary_cross_entropy_with_logits instead of binary_cross_entropy, and FP32 for "
    "softmax, norms, exp, log, pow and large sums.",
    "If only one rank is named, check its data, then its hardware (XID, ECC).",
)
WHY_NONFINITE_ENDS = (
    "NaN and Inf come from an overflow, a division by zero or a logarithm of zero, mostly in "
    "the few operations whose results leave FP16's range; FP32 or the fused form avoids that."
)
