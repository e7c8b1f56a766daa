"""What the guard asks of the training loop, which reads it when it suits."""


class Requests:
    """The same on every rank at the same step, since all ranks decide alike."""

    def __init__(self) -> None:
        self.stop = False
        """Stays True."""
        self._checkpoint = False
        self._untold: int | None = None

    def ask_for_checkpoint(self, step: int) -> None:
        """Have `take_checkpoint` return True, and `take_untold` the step, once each."""
        self._checkpoint = True
        self._untold = step

    def take_untold(self) -> int | None:
        """Return the step of a request that callbacks are to be called with; None without one."""
        step, self._untold = self._untold, None
        return step

    def take_checkpoint(self) -> bool:
        """Return whether a checkpoint was asked for since the last call."""
        asked, self._checkpoint = self._checkpoint, False
        return asked
