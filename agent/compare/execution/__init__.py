"""Runs a reference and a candidate side by side, and compares each module as it runs.

`session` makes two copies of the model that share its weights (`copies`), and runs each in a
thread. The threads alternate (`lockstep`): both stop where a module begins and ends (`calls`) and
where a gradient is known, and the reference's thread compares them (`observer`). `precision` holds
what makes the candidate one, `replay` runs a module's own operations from the reference's inputs.
"""
