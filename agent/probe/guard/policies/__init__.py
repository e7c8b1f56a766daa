"""The policies that follow what becomes of updates.

`slow_policies` are decided on the host, where `trouble` counts: `learning_rate`, `precision` (by
`switched_module`) and `requests`. `scale_floor` is decided on the loss scale's device.
"""
