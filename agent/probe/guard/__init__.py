"""The guard: it acts on updates that would harm the training, on all ranks alike.

Off unless `init(guard=…)` names policies (`mp_agent.catalog.guard`). Just before an optimizer
uses its gradients, `reading` measures them and `agreement` adds the numbers up over the ranks, so
that every rank knows the same. `verdict` compares them with what has been usual (`usual_norm`),
within limits (`action_budget`), without leaving the device; `update` carries the verdict out.
`outcome` brings it to the host some steps later, where `trouble` counts, and the slower policies
follow: `learning_rate`, `loss_scale`, `precision`, `requests`, of which `checkpoint_callbacks`
notifies the script. `training_guard` ties all of it together, `guarded_optimizer` holds what
belongs to one optimizer.
"""
