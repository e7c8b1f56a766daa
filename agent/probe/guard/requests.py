"""What the guard asks of the training loop, which reads it when it suits."""


class Requests:
    """The same on every rank at the same step, since all ranks decide alike."""

    def __init__(self) -> None:
        self.stop = False
        """Stays True."""
        self._checkpoint = False

    def ask_for_checkpoint(self) -> None:
        """Have `take_checkpoint` return True once."""
        self._checkpoint = True

    def take_checkpoint(self) -> bool:
        """Return whether a checkpoint was asked for since the last call."""
        asked, self._checkpoint = self._checkpoint, False
        return asked
