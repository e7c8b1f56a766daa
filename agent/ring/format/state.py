"""The live state of a rank: what changes with every hook, as one slot of the ring's head."""

from dataclasses import dataclass

from mp_agent.records.steps import EndReason, Phase, RankState
from mp_agent.ring.format.layout import NAME_BYTES_MAX, STATE


@dataclass(slots=True)
class LiveState:
    """Live state, changed in place and published as a whole, so that readers see one moment."""

    phase: int = Phase.STARTING
    end_reason: int = EndReason.RUNNING
    phase_unix_ns: int = 0
    started_sequence: int = 0
    committed_sequence: int = 0
    steps_written: int = 0
    layers_written: int = 0
    body_offset: int = 0
    generation: int = 0
    probe_errors: int = 0
    setting_errors: int = 0
    records_dropped: int = 0
    probe_seconds: float = 0.0
    scrape_wait: bool = False
    phase_name: bytes = b""
    """UTF-8, cut to 64 bytes; empty when the phase's own name says it."""

    def pack(self) -> bytes:
        """Return the payload of a state slot."""
        return STATE.pack(
            self.phase,
            self.end_reason,
            self.phase_unix_ns,
            self.started_sequence,
            self.committed_sequence,
            self.steps_written,
            self.layers_written,
            self.body_offset,
            self.generation,
            self.probe_errors,
            self.setting_errors,
            self.records_dropped,
            self.probe_seconds,
            self.scrape_wait,
            len(self.phase_name),
            self.phase_name,
        )

    @classmethod
    def unpack(cls, payload: bytes) -> "LiveState":
        """Return the state that `pack` wrote."""
        *numbers, scrape_wait, name_bytes, name = STATE.unpack(payload)
        fields = (*numbers, bool(scrape_wait), name[:name_bytes])
        return cls(*fields)

    def rank_state(self, unsupported: tuple[str, ...]) -> RankState:
        """Return the part that readers use."""
        phase = Phase(self.phase)
        return RankState(
            phase=phase,
            phase_name=self.phase_name.decode(errors="ignore") or phase.name.lower(),
            phase_unix_ns=self.phase_unix_ns,
            started_sequence=self.started_sequence,
            committed_sequence=self.committed_sequence,
            end_reason=EndReason(self.end_reason),
            scrape_wait=self.scrape_wait,
            probe_errors=self.probe_errors,
            setting_errors=self.setting_errors,
            records_dropped=self.records_dropped,
            probe_seconds=self.probe_seconds,
            unsupported=unsupported,
        )


def encode_name(name: str) -> bytes:
    """Return a phase's name as the state holds it."""
    return name.encode(errors="replace")[:NAME_BYTES_MAX]
