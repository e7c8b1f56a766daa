"""Compares a model's precisions module by module (torch).

`api` runs each candidate along with the reference and has `search` find what has to stay in FP32;
`model` holds the result, `origins` finds where error begins, `report` shows it.
"""
