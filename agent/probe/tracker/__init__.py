"""Follows each training step from event to event, and decides when gradients are measured.

`step_tracker` says what handles each event of the hooks: `backward` follows backwards and losses,
`optimizer_steps` steps, closures and replayed graphs, `measuring` clipping and loss scaling. It
also hands gradients, and complete steps, to the recorder. All share one `context`.
"""
