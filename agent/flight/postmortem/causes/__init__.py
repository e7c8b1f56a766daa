"""One module per source of evidence: each yields the diagnoses that a case supports."""

from collections.abc import Callable, Iterator

from mp_agent.flight.postmortem.case import Case
from mp_agent.flight.postmortem.causes.alerts import alerts
from mp_agent.flight.postmortem.causes.ends import ends
from mp_agent.flight.postmortem.causes.nonfinite import gpu_errors, nonfinite
from mp_agent.flight.postmortem.causes.ranks import one_rank, own_nan, unusual_batch
from mp_agent.flight.postmortem.diagnosis import Diagnosis

DETECTORS: tuple[Callable[[Case], Iterator[Diagnosis]], ...] = (
    gpu_errors,
    unusual_batch,
    nonfinite,
    own_nan,
    one_rank,
    alerts,
    ends,
)
"""All sources of evidence."""
