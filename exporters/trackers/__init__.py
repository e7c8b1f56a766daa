"""Metrics and conditions of a run in experiment trackers, sent by the node agent.

`values.py` takes the numbers of a run from a snapshot, `sender.py` sends them in a thread of its
own, `links.py` says what is shown of the tracker's run, and each tracker has a module that alone
imports its package.
"""
