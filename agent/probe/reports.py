"""What the probe reports of itself: failures, and features that it does not measure."""

import logging

from mp_agent.ring.writer import RingWriter

log = logging.getLogger("mp_agent")


class ProbeReports:
    """Counts failures and lists unsupported features in the ring, or until there is one in memory.

    Each unsupported feature is logged once.
    """

    def __init__(self) -> None:
        self._writer: RingWriter | None = None
        self._failures = 0
        """Before there was a ring."""
        self._features: list[str] = []
        """In order, noted before there was a ring."""
        self._logged: set[str] = set()
        self._device_failed = False

    def write_to(self, writer: RingWriter) -> None:
        """Write to this ring from now on, beginning with what was noted before."""
        self._writer = writer
        writer.count(probe_errors=self._failures)
        for feature in self._features:
            writer.note_unsupported(feature)

    def count_failure(self) -> None:
        """Count a failure of the probe."""
        if self._writer is None:
            self._failures += 1
        else:
            self._writer.count(probe_errors=1)

    def note_unsupported(self, feature: str) -> None:
        """Report a feature of the training script that is not measured.

        Not once a device has failed: that is then the reason, and not the script.
        """
        self._note("mp_agent does not measure this: %s; the rest of it goes on", feature)

    def note_unguarded(self, feature: str) -> None:
        """Report updates on which the guard does not act; they are measured as all others.

        feature: begins with "the guard".
        """
        self._note("%s is off: these updates are made as without a guard", feature)

    def _note(self, message: str, feature: str) -> None:
        if self._device_failed:
            return
        if feature not in self._logged:
            self._logged.add(feature)
            log.warning(message, feature)
        self.list_unsupported(feature)

    def list_unsupported(self, feature: str) -> None:
        """Report a feature that does not take place, and leave it to the caller to log why."""
        if self._writer is not None:
            self._writer.note_unsupported(feature)
        elif feature not in self._features:
            self._features.append(feature)

    def note_capture(self) -> None:
        """Report that steps within CUDA graphs are not measured."""
        self.note_unsupported("CUDA graph capture")

    def note_device_error(self) -> None:
        """Report that a device runs no more, after an error of what it was given to run."""
        self.note_unsupported("steps after an error of the device")
        self._device_failed = True

    def note_rest(self, kind: str) -> None:
        """Report that a part of the probe keeps failing and is suspended."""
        self.note_unsupported(f"{kind}, which keeps failing")
