"""In-band reduction: the ranks merge their columns by collectives of the job itself.

Off unless `init(reduction="process_group")` asks for it. `layout` is what the ranks agree on once:
the groups of tensors that any of them measures. `packing` makes two small tensors of a rank's
record, of which one is added up and of the other the largest is taken; `exact_sum` keeps the sums
exact, whatever the order of the ranks. `group_reduction` starts the collectives at the end of a
step, and takes their results up later. The numbers are those of the node agents' merge.
"""
