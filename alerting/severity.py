"""How much a condition hurts."""

from enum import Enum


class Severity(Enum):
    """Label `severity` of an alert, worst first; a worse one mutes the milder of the same run."""

    CRITICAL = "critical"
    WARNING = "warning"
    INFO = "info"
