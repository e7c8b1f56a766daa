"""Runs copies of a model: a reference and a candidate side by side, or a training by a plan.

`session` makes two copies of the model that share its weights, and runs each in a thread. The
threads alternate (`lockstep`): both stop where a module begins and ends (`calls`) and where a
gradient is known, and the reference's thread compares them (`observer`, by `errors`). `precision`
holds what makes the candidate one. `training` takes steps with a copy by a plan.
"""
