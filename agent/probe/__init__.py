"""The probe: hooks and statistics inside each rank. The only part that imports torch.

A gradient's way goes through these packages downwards, from the hook to the ring:

1. `hooks` wrap functions of torch and DeepSpeed, and report events. Each report runs in the guard
   of `isolation`, which keeps failures away from training and measures the time.
2. `tracker` follows the step from event to event, and decides when gradients are measured and when
   a step ends. At the first event `ring_connection` opens the ring.
3. `recording` measures: a row of statistics of each share, and of each layer when it is due.
4. `step` has the step under way: what was observed of it, where it ends, when layers are due.
5. `optimizers` has the watched optimizers, and a plan of each: which parameters are which layers.
   `engines` makes such plans of DeepSpeed and Megatron-Core, `placement` finds which share of each
   parameter this rank holds.
6. `statistics` compute the rows, by kernels for each kind of device.
7. `instruments` measure on request, on sampled steps: outputs of modules, attention logits, how
   routers distribute tokens over experts, what FP8 makes of operands, a rank's own gradients,
   log-probabilities, tensors that the script names.
8. `delivery` brings the step into the ring (`mp_agent.ring`): at once from the host, by transfers
   with checksums from a device. `accelerator` has all calls to the runtime of a device.

Where the user asks for it, `guard` acts on updates, after they were measured, and `reduction` has
the ranks merge their records, which `packing` makes one tensor of.

Around it: `api` implements the public functions; `attachment` ties the probe to this process, with
its ring (`ring_connection`), its node agent, its exit and its identity (`processes`); `meeting` has
ranks meet at the job's store; `command` is `mp-agent run`.
"""
