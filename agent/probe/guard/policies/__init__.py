"""The policies that follow what becomes of updates.

`slow_policies` are decided on the host, where `trouble` counts: `learning_rate`, `precision` (by
`switched_module`) and `requests`. `loss_scales` are decided on the loss scale's device:
`scale_floor` and `scale_reset`.
"""
