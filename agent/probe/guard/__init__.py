"""The guard: it acts on updates that would harm the training, on all ranks alike.

Off unless `init(guard=…)` names policies (`mp_agent.catalog.guard`). Just before an optimizer
uses its gradients, `decision` measures them, agrees on the numbers with the other ranks, and
decides without leaving the device; `update` carries the verdict out, and `rollback` undoes an
update that cannot be prevented. `policies` are those that follow what becomes of updates: some
steps later on the host, or on the loss scale's device; `checkpoint_callbacks` notifies the script
of what they ask for. `training_guard` ties all of it together, `guarded_optimizer` holds what
belongs to one optimizer, `action_columns` records what is done and `action_log` logs it.
"""
