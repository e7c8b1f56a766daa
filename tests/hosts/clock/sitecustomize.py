"""Lets the wall clock of a Python process go wrong, as that of a host may: see `Host.clock_skew`.

Time namespaces have no wall clock of their own, and libfaketime is not everywhere.
"""

import os
import time

_SKEW_SECONDS = float(os.environ.get("TEST_CLOCK_SKEW_SECONDS", "0"))

if _SKEW_SECONDS:
    _time, _time_ns = time.time, time.time_ns
    time.time = lambda: _time() + _SKEW_SECONDS
    time.time_ns = lambda: _time_ns() + round(_SKEW_SECONDS * 1e9)
