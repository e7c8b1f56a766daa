"""Measures the routers of mixtures of experts during the forward pass of sampled steps.

`gates` finds the routers of a model and says how each is read, `routing` reads what a call of one
decided, `statistics` computes a row of it, `sampling` hooks them for one forward pass, and `step`
adds the rows to the step under way.
"""
