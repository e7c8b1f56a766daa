"""The policies of the guard: what sets each off, what it does, and its parameters.

Settings check names and values against these records, the probe acts by them, and the documents
are generated from them.
"""

from mp_agent.catalog.guard.checks import default_policies, with_defaults
from mp_agent.catalog.guard.policies import POLICIES, POLICIES_BY_NAME
from mp_agent.catalog.guard.policy import DRY_RUN, Action, Parameter, Policy, Values

__all__ = [
    "DRY_RUN",
    "POLICIES",
    "POLICIES_BY_NAME",
    "Action",
    "Parameter",
    "Policy",
    "Values",
    "default_policies",
    "with_defaults",
]
