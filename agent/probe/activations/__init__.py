"""Measures the outputs of modules during the forward pass of sampled steps.

`modules` finds the modules whose outputs are measured, `sampling` hooks them for one forward pass
(`forward_hook`), `statistics` computes a row of one output. `output_gradients` looks at the
gradients of inputs and outputs in the backward pass that follows.
"""
