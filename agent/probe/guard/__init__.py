"""The guard: it acts on updates that would harm the training, on all ranks alike.

Off unless `init(guard=…)` names policies (`mp_agent.catalog.guard`). Just before an optimizer
uses its gradients, `verdict` measures them and decides without leaving the device; `update` carries
the verdict out, holds learning rates that have jumped, and undoes an update that cannot be
prevented. `outcome` has the ranks agree on what became of it, and logs it. `loss_scales` and
`slow_policies` follow what becomes of updates: on the loss scale's device, or some steps later on
the host. `training_guard` ties all of it together, and records what is done.
"""
