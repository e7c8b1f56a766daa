"""The order in which a page names alerts: what can be the cause of another stands before it."""

from collections.abc import Iterator

from mp_agent.alerting.conditions import CONDITIONS
from mp_agent.alerting.first_line.causes import FOLLOWS_FROM
from mp_agent.errors import CatalogError


def _ordered() -> Iterator[str]:
    """Yield every condition after all that it can follow from, else as in the catalog."""
    names = [condition.name for condition in CONDITIONS]
    known = {*FOLLOWS_FROM, *(cause for causes in FOLLOWS_FROM.values() for cause in causes)}
    if unknown := known.difference(names):
        raise CatalogError(f"no condition is named {', '.join(sorted(unknown))}")
    waiting = list(dict.fromkeys((*FOLLOWS_FROM, *names)))
    while waiting:
        ready = (
            name for name in waiting if not set(FOLLOWS_FROM.get(name, ())).intersection(waiting)
        )
        found = next(ready, None)
        if found is None:
            raise CatalogError(f"these follow from each other: {', '.join(waiting)}")
        waiting.remove(found)
        yield found


CAUSES_FIRST = tuple(_ordered())
"""The names of all conditions."""
