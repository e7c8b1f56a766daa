"""Comparison of a model's precisions module by module (torch), and of two runs step by step.

`target` finds a model, `api` compares it: `execution` runs a reference and a candidate side by
side, `measure` computes the errors, `search` finds what has to stay in FP32, `report` holds and
shows the result. `runs` compares two recorded runs, without torch.
"""
