"""The examples of every condition: each module of this folder that has `EXAMPLES` adds its own."""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from mp_agent.alerting.condition import Condition
from tests.alerting.examples.example import Examples


def _found() -> Mapping[str, Examples]:
    found: dict[str, Examples] = {}
    for path in sorted(Path(__file__).parent.glob("[!_]*.py")):
        if path.stem != Path(__file__).stem and not path.stem.startswith("test_"):
            module = import_module(f"tests.alerting.examples.{path.stem}")
            found |= getattr(module, "EXAMPLES", {})
    return found


EXAMPLES = _found()
"""By the name of the condition."""


def examples_of(condition: Condition) -> Examples:
    """Return the examples of a condition of the catalog."""
    return EXAMPLES[condition.name]
