"""The probe: hooks and statistics inside each rank. The only part that imports torch.

The way of a gradient, from the hook to the ring:

1. `hooks` wrap torch's own functions. What they call runs in `guard`, which keeps failures away
   from training, and takes the time.
2. `follower` learns from them how far the step has come, and when to look; `course` when it ends.
3. `subjects` has the optimizers, and of each a `plan`: which parameters count as which layers
   (`discovery` finds names and modules), and which share of them this rank holds (`placement`).
4. `recorder` looks: `statistics` make a row of each share, and of each layer when it is due
   (`schedule`). What was seen goes into the `step`.
5. `delivery` brings the step into the ring: at once from the host, by `mailbox` from a device.

`api` is what users call; `attachment` ties the probe to its ring, its node agent and its exit.
"""
