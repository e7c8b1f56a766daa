"""The node agent: one process per node and run, without torch, that reads, merges and exports.

The way of a step, from the rings to the scrape:

1. `source` reads a rank's ring. `attempt` waits for the ranks of the node and reduces what they
   wrote to rows of the node (`reduce`, `reduce_layers`), whose sums are exact.
2. `exchange` hands the rows to `push`, which brings them to the node of rank 0. There `root` waits
   for all nodes and merges (`merge`, `merge_layers`); `shares` says what counts how often.
3. `intake` takes the merged steps and layers into the `account`, and `conditions` judges them.
4. `views` say what a run shows, `snapshot_builder` makes series of it by the catalog, at most as
   many as `governor` grants, and `server` hands them to whoever scrapes.

`run` does all this for one run: `admission` lets new rings in, and `run_state` goes over to the
next node agent by the `ledger`. `agent` is the loop around all runs, with its services: `push`,
`flight`, `otlp`, `discovery`.
"""
