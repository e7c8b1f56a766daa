"""The comparison of two runs at equal steps: where one leaves the other. Needs no torch.

`command` reads the runs, `divergence` compares them, `report` shows the result.
"""
