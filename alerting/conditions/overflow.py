"""What to do about FP16 overflow; shared by the conditions of the loss scale."""

OVERFLOW_REMEDIES = (
    "Lower the learning rate tenfold and check that the inputs are normalised.",
    "Check initialisation (Xavier weights, zero biases) and put LayerNorm into residual branches.",
    "Find the layer that overflows and run it in FP32, or train in BF16; a lower initial scale "
    "only shortens calibration.",
)
WHY_OVERFLOW_ENDS = (
    "GradScaler halves the scale whenever a scaled gradient overflows FP16; when it keeps doing "
    "so, no scale fits, and it is the values that have to shrink."
)
