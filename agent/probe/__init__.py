"""The probe: hooks and statistics inside each rank. The only part that imports torch.

A loss comes first. `hooks.loss` sees the outermost backward start from it, and reports that; every
report runs in the shield of `isolation`, which keeps failures away from training and takes the
time. `tracker.backward` undoes what scaled the loss and adds it to the open step
(`step.open_step`), which has the losses of all micro-batches. `step.boundaries` knows which step
that is, `step.thread_progress` what this thread did with gradients since.

A gradient follows. Backward makes it, and the next of unscaling, clipping and the optimizer's step
is about to change it:

1. `hooks.optimization` reports that, and `tracker.optimizer_steps` (or `tracker.measuring`, of
   clipping and loss scaling) says whether a step begins, goes on or ends with it. At the first
   event `ring_connection` opens the ring.
2. `optimizers` has the watched optimizers, and a plan of each: which parameters are which layers.
   `engines` makes such plans of DeepSpeed and Megatron-Core, `placement` finds which share of each
   parameter this rank holds.
3. `recording.recorder` has the gradients of these plans measured: a row of each share on every
   step, one of each layer when `step.layer_schedule` says so. `statistics` computes the rows, by
   kernels for each kind of device.
4. `delivery` brings the step into the ring (`mp_agent.ring`), unchanged: at once from the
   host, by transfers with checksums from a device. `accelerator` has all calls to the runtime of a
   device.
5. Once the optimizer has stepped, `tracker.measuring` ends the step, and loss and gradients are
   written as one record.

All else that is measured is an instrument (`instruments.instrument`): the tracker and the recorder
report the events of a step, and each instrument that is on adds its rows or columns. Those of the
forward pass see outputs of modules, attention logits, routers, FP8 operands and tensors that the
script names; those of the backward pass a rank's own gradients; those around the update, in
`recording`, what the optimizer did to the weights and the bits by which replicas are compared.

Where the user asks for it, `guard` acts on updates, after they were measured, and `reduction` has
the ranks merge their records, which `packing` makes one tensor of.

Around it: `api` implements the public functions; `attachment` ties the probe to this process, with
its ring (`ring_connection`), its node agent, its exit and its identity (`processes`); `meeting` has
ranks meet at the job's store; `command` is `mp-agent run`.
"""
