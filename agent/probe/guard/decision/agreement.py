"""The sums over all ranks on which every rank decides alike."""

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from mp_agent.probe import accelerator
from mp_agent.probe.meeting import Meeting, OwnGroup, reduced
from mp_agent.ring.interruptions import pass_on


class Agreement:
    """Adds numbers up over the ranks of a process group, the job's own unless one is given.

    The ranks meet before the first sum, and do so again when the job makes its groups again. Sums
    are made in a gloo group of the guard's own, which ends with the job's. Where the job has no
    gloo they are part of the stream of its own collectives: no other communicator may run on a
    GPU at the same time.
    """

    def __init__(
        self,
        settings: Mapping[str, object],
        group: Callable[[], dist.ProcessGroup | None] = lambda: None,
    ) -> None:
        """Meet no other rank yet.

        settings: what decides, by name. group: returns the group; None for the job's own.
        """
        self._settings = settings
        self._group = group
        self._met_in: dist.ProcessGroup | None = None
        """The job's own group when the ranks met."""
        self._meeting: Meeting | None = None
        self._own: OwnGroup | None = None
        self._sent: torch.Tensor | None = None

    @property
    def ranks(self) -> int:
        """How many ranks agree: 1 without a process group."""
        return 1 if self._meeting is None else len(self._meeting.ranks)

    def meet(self, device: torch.device) -> bool:
        """Meet the other ranks if that is due; return whether it was. device: of the gradients.

        Raises NotMet where ranks are missing or decide by other settings, RuntimeError where they
        cannot be reached.
        """
        world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        if world is self._met_in:
            return False
        self.release()
        self._met_in = world
        if (meeting := Meeting.of("the guard", self._group())) is None:
            return False
        place = "the host" if accelerator.is_on_host(device) else "a device"
        meeting.join({**self._settings, "the place of decisions": place})
        if _has_gloo(device, self._group()):
            self._own = meeting.connect()
        self._meeting = meeting
        return True

    def sums(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the sums over all ranks, on the same device.

        Raises RuntimeError where the others are not there in time: within the time-out of a wait,
        or on a GPU within that of the job's group.
        """
        if self._meeting is None:
            return numbers
        sent = self._sent = numbers.to("cpu" if self._own else numbers.device, copy=True)
        if self._own is None:
            dist.all_reduce(sent, group=self._group())
        else:
            reduced(self._own, sent, dist.ReduceOp.SUM).wait()
        return sent.to(numbers.device, copy=True)

    def all_agree(self) -> bool:
        """Return whether all ranks have the sums: they may fail on one rank and not on another."""
        return self._meeting is None or self._meeting.all_agree(True)

    def decline(self) -> None:
        """Have no other rank act on the sums, which this one does not have; then leave the ranks.

        Where the store cannot be reached, the others give this rank up after a wait.
        """
        try:
            if self._meeting is not None:
                self._meeting.all_agree(False)
        except Exception as error:
            pass_on(error)
        finally:
            self.release()

    def leave(self) -> None:
        """Release the groups, which are about to end: the ranks meet again in those made next."""
        self.release()
        self._met_in = None

    def release(self) -> None:
        """Release the own group, and the store."""
        self._meeting = self._own = None
        self._sent = None


def _has_gloo(device: torch.device, group: dist.ProcessGroup | None) -> bool:
    """Return whether a group of gloo's serves as well as the job's own for what is on `device`."""
    backends = dist.get_backend_config(group)
    by_device = dict(pair.split(":") for pair in backends.split(",") if ":" in pair)
    return dist.is_gloo_available() and by_device.get(device.type, "gloo") in ("gloo", "mpi")
