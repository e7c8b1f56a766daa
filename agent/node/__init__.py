"""The node agent: one process per node and run, without torch, that reads, merges and exports.

The packages, in the order in which a step passes them (see `run.run.Run.poll`):

* `collect` reads the ranks' rings and assembles this node's part of a step.
* `merge` reduces ranks' rows to rows of the node, and rows of nodes to the run's step.
* `cluster` queues rows for the root node, and merges at the root what all nodes report.
* `transport` carries reports and receipts between node agents over HTTP.
* `accounting` updates counters and derived state with each step: losses, norms, layers, stragglers.
* `conditions` judges the conditions after each step, and notifies the log and the ranks.
* `series` evaluates the metric catalog over the views of a run, within `max_series`.
* `run` ties this together for one run: which rings belong to it, its ledger and its views; its
  `script_check` has the main script checked.
* `flight` writes and replays flight records.
* `http` serves /metrics and the status page on the one port.
* `export` takes snapshots for scrapes and pushes, and provides service discovery.
* `commands` are the subcommands of `mp-agent` that start, wrap or ask a node agent.

`main` configures the process and runs `agent`, the loop, with what starts and stops in it.
`registry` holds the runs, each with its lock, status file and removal; `leftovers` removes files of
killed jobs. `endpoint`, `tls` and `logs` configure its port, its TLS contexts and its log.
"""
