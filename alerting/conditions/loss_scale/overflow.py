"""What to do about FP16 overflow; shared by the conditions of the loss scale."""

OVERFLOW_REMEDIES = (
    "Reduce the learning rate tenfold and check that the inputs are normalized.",
    "Check the initialization (Xavier weights, zero biases) and add LayerNorm to residual "
    "branches.",
    "Find the layer that overflows and run it in FP32, or train in BF16; a lower initial scale "
    "only shortens calibration.",
)
WHY_OVERFLOW_ENDS = (
    "GradScaler halves the scale whenever a scaled gradient overflows FP16; if that continues, "
    "no scale is suitable, and the values themselves must shrink."
)
