"""Each rank's own gradients, before wrappers reduce them over the ranks.

`sources` knows what backward adds a gradient to; `gradient_hooks` sees when it has; `step` measures
it, and knows the step; `totals` adds up what was measured.
"""
