"""Follows each training step from event to event, and decides when gradients are measured.

`step_tracker` receives every event of the hooks, in the order in which a step happens, and passes
it down to the module of its subject: `loss`, `backward`, `loss_scaling`, `clipping`,
`optimizer_steps`, `engine_steps`, `activity` (evaluation, checkpoints). These call `measuring`,
which hands gradients to the recorder, and `step_end`, which hands it complete steps. `succession`
decides when another optimizer becomes the run's own. All share one `context`.
"""
