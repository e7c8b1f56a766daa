"""Ranks of a job: processes of one function each, of which none has to import torch."""

import multiprocessing
from collections.abc import Callable
from typing import Any

from torch.multiprocessing.spawn import start_processes

_PRELOADED = ["torch", "torch.distributed.fsdp", "mp_agent.probe.probe"]


def run_ranks(job: Callable[..., None], *arguments: Any, ranks: int) -> None:
    """Run `job(rank, *arguments)` for each rank, and raise what the first that fails raises.

    The processes are forked off a server that has imported torch and has used nothing of it: it
    has no group, no pool of threads and no probe that they could inherit.
    """
    multiprocessing.set_forkserver_preload(_PRELOADED)
    start_processes(job, args=arguments, nprocs=ranks, start_method="forkserver")


def exit_code_of_process(job: Callable[..., None], *arguments: Any) -> int | None:
    """Return how one such process of `job(*arguments)` ended; -n for signal n.

    It may go backward also where a build of torch for CUDA refuses that in a process that was
    forked off one that has done so.
    """
    multiprocessing.set_forkserver_preload(_PRELOADED)
    process = multiprocessing.get_context("forkserver").Process(target=job, args=arguments)
    process.start()
    process.join()
    return process.exitcode
