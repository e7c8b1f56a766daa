"""How long a run has stood, and how long its pauses in training usually are."""

from mp_agent.records.steps import Phase

_TRAINING = frozenset(
    phase.name.lower() for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
)
_HALF_LIFE_SECONDS = 12 * 3600.0


class Standstill:
    """Knows when the run last completed a step or changed the kind of its phase.

    A pause in training that ended was none that hangs: rollouts of an RL trainer, evaluations that
    nothing marks. The longest of them is remembered and fades, since such pauses come back.
    Times are of a clock that does not go back.
    """

    def __init__(self) -> None:
        """Know of no step yet."""
        self._mark: tuple[str, int, str] | None = None
        self._since_seconds = 0.0
        self._longest_seconds = 0.0
        self._longest_at_seconds = 0.0

    def look(self, attempt: str, sequence: int, phase_name: str, now_seconds: float) -> None:
        """Note where the run stands: its attempt, its last step, and the phase furthest behind."""
        kind = "training" if phase_name in _TRAINING else phase_name
        mark = (attempt, sequence, kind)
        if mark == self._mark:
            return
        before = self._mark
        if before is not None and before[0] == attempt and before[1] and before[2] == "training":
            self._remember(now_seconds - self._since_seconds, now_seconds)
        self._mark, self._since_seconds = mark, now_seconds

    def seconds(self, now_seconds: float) -> float | None:
        """Return how long the run has stood; None before the first look."""
        return None if self._mark is None else max(now_seconds - self._since_seconds, 0.0)

    def longest_pause_seconds(self, now_seconds: float) -> float:
        """Return the longest pause that ended, as far as it has not faded."""
        age_seconds = max(now_seconds - self._longest_at_seconds, 0.0)
        return self._longest_seconds * float(0.5 ** (age_seconds / _HALF_LIFE_SECONDS))

    def _remember(self, seconds: float, now_seconds: float) -> None:
        if seconds >= self.longest_pause_seconds(now_seconds):
            self._longest_seconds, self._longest_at_seconds = seconds, now_seconds
