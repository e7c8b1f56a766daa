"""Each rank's own gradients, before wrappers reduce them over the ranks.

`gradient_hooks` sees when backward has added to a gradient; `step` measures it, and knows the step.
"""
