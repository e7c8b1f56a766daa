"""What is known of a model before it is trained: precisions compared, chosen, measured (torch).

`commands` has what is typed, `target` finds the model. `execution` runs copies of it: a reference
and a candidate side by side, or trainings by a plan. `comparison` says where a precision errs,
`recommendation` chooses a plan, `evaluation` measures one. `precision_plan` and `formats` are plain
data.
"""
