"""Has the kernels of the statistics compiled while the training starts."""

import logging

import torch

from mp_agent.probe.processes.detached import Starting, start_detached
from mp_agent.probe.processes.node_agent import process_environment
from mp_agent.ring.interruptions import pass_on
from mp_agent.settings import Settings

log = logging.getLogger("mp_agent")

_MODULE = "mp_agent.probe.statistics.fused.compile"


class KernelCompiler:
    """A process that compiles for this node's GPUs. Used by local rank 0 alone."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._starter: Starting | None = None

    def begin(self) -> None:
        """Start it where torch is built for GPUs; where it cannot be, the ranks compile."""
        if not self._settings.fused_kernels:
            return
        if torch.version.cuda is None and torch.version.hip is None:
            return
        module = [_MODULE, *(["--distribution"] if self._settings.measure_distribution else [])]
        try:
            self._starter = start_detached(module, process_environment(self._settings))
        except Exception as error:
            pass_on(error)
            log.debug("the kernels are not compiled ahead: %r", error)

    def poll(self) -> None:
        """Give back what watches the start. Called at the end of a step; never waits."""
        if self._starter is not None and self._starter.poll() is not None:
            self._starter = None
