"""One run on this node, from its first ring to its ledger."""
