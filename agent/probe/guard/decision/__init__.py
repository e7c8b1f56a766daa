"""What to do with one update, on numbers that every rank knows.

`reading` measures gradients as the optimizer is about to use them, and `agreement` adds the numbers
up over the ranks. `verdict` compares them with what has been usual (`usual_norm`), within limits
(`action_budget`), on the device; `outcome` brings the verdict to the host some updates later.
"""
