"""Metrics and conditions of a run in experiment trackers, sent by the node agent.

`client.py` takes the numbers of a run from a snapshot, says what is shown of the tracker's run, and
sends them in a separate thread; each tracker has a module that alone imports its package.
"""
