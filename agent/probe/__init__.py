"""The probe: hooks and statistics inside each rank. The only part that imports torch.

A gradient's way goes through these packages downwards, from the hook to the ring:

1. `hooks` wrap functions of torch and DeepSpeed, and report events. Each report runs in the guard
   of `isolation`, which keeps failures away from training and measures the time.
2. `tracker` follows the step from event to event, and decides when gradients are measured and when
   a step ends. At the first event `ring_connection` opens the ring.
3. `recording` measures: a row of statistics of each share, and of each layer when it is due.
4. `step` has the step under way: what was observed of it, where it ends, when layers are due.
5. `optimizers` has the watched optimizers, and a plan of each: which parameters are which layers.
   `deepspeed` makes such plans of engines, `placement` finds which share of each parameter this
   rank holds.
6. `statistics` compute the rows, by kernels for each kind of device.
7. `activations` measure the outputs of modules, on sampled steps, in the forward pass before;
   `attention` measures attention logits and output logits there, `routers` how tokens are
   distributed over experts, `fp8` what FP8 makes of the operands of linear layers.
8. `delivery` brings the step into the ring (`mp_agent.ring`): at once from the host, by transfers
   with checksums from a device. `accelerator` has all calls to the runtime of a device.

Where the user asks for it, `guard` acts on updates, after they were measured, and `reduction` has
the ranks merge their records by themselves.

Around it: `api` implements the public functions; `attachment` ties the probe to this process, with
its ring (`rank_ring`), its node agent and its exit (`processes`); `identity` finds out which rank
this is; `reports` has what the probe reports of itself; `command` is `mp-agent run`.
"""
