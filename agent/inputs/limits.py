"""Limits of a process that works on the same node as a training."""

import os
import resource


def limit_resources(*, niceness: int, cpu_seconds: int, memory_bytes: int) -> None:
    """Leave the processors to the training, and end this process if it takes too much."""
    os.nice(niceness)
    for kind, wanted in (
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(kind, (allowed, hard))
