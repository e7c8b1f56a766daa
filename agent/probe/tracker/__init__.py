"""Follows each training step from event to event, and decides when gradients are measured.

`step_tracker` receives every event of the hooks, in the order in which a step happens, and passes
it down to the module of its subject: `backward`, `optimizer_steps`, or `measuring` (clipping, loss
scaling), which hands gradients and complete steps to the recorder, and decides when another
optimizer becomes the run's own. All share one `context`.
"""
