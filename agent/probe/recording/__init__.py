"""Measures gradients and brings steps into the rank's ring.

`recorder` is what the tracker calls; each of its failures is contained. `weight_updates` and
`replica_evidence` are instruments around the update of the weights; `ring_schema` keeps the ring's
schema in agreement with the plans, and `run_facts` finds what it says of the run.
"""
