"""The search for modules that have to stay in FP32."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Passes = Callable[[frozenset[str]], bool]


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a search."""

    kept: tuple[str, ...]
    passes: bool
    minimal: bool
    """Whether no single one can be left out; False when the trials ran out before."""
    trials: int


class _Exhausted(Exception):
    """The trials ran out."""


def find_kept(
    ranked: Sequence[str], passes: Passes, trials_max: int, last_resort: frozenset[str]
) -> Found:
    """Return a set of modules with which a candidate passes.

    ranked: names of modules, the most suspect first; keeping one keeps all within it. The shortest
    prefix that passes is found by doubling and bisection, then reduced by delta debugging (Zeller
    and Hildebrandt 2002: complements of ever smaller parts), until no single module can be left
    out; then each module is replaced by those within it, where that still passes. last_resort is
    tried when all of `ranked` fail. The set that is returned has passed a trial.
    """
    search = _Search(passes, trials_max)
    best: tuple[str, ...] = ()
    minimal = False
    try:
        best = tuple(_prefix(list(ranked), search) or ())
        if not best and search(tuple(last_resort)):
            best = tuple(sorted(last_resort))
            return Found(best, True, True, search.trials)
        if best:
            best = _reduced(best, ranked, search)
            best = _refined(best, ranked, search)
            minimal = True
    except _Exhausted:
        best = search.smallest or best
    if search.smallest is not None and not minimal:
        best = search.smallest
    return Found(best, bool(best), minimal and bool(best), search.trials)


def outermost(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names without those of modules within others of them, sorted."""
    return tuple(
        sorted(
            name
            for name in set(names)
            if not any(other != name and is_within(name, other) for other in names)
        )
    )


def is_within(name: str, other: str) -> bool:
    """Return whether a module is within another one, by name."""
    return name.startswith(f"{other}.") if other else not name.startswith("(")


class _Search:
    """Counts and remembers trials."""

    def __init__(self, passes: Passes, trials_max: int) -> None:
        self.trials = 0
        self.smallest: tuple[str, ...] | None = None
        self._passes = passes
        self._trials_max = trials_max
        self._known: dict[tuple[str, ...], bool] = {}

    def __call__(self, names: Sequence[str]) -> bool:
        key = outermost(names)
        if key not in self._known:
            if self.trials >= self._trials_max:
                raise _Exhausted
            self.trials += 1
            self._known[key] = self._passes(frozenset(key))
        passed = self._known[key]
        if passed and (self.smallest is None or len(key) <= len(self.smallest)):
            self.smallest = key
        return passed


def _prefix(ranked: list[str], search: _Search) -> list[str] | None:
    """Return the shortest prefix that passes, as far as passing is monotone; None for none."""
    low, high = 0, 1
    while high < len(ranked) and not search(ranked[:high]):
        low, high = high, 2 * high
    high = min(high, len(ranked))
    if not ranked or not search(ranked[:high]):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if search(ranked[:middle]) else (middle, high)
    return ranked[:high]


def _reduced(names: Sequence[str], ranked: Sequence[str], search: _Search) -> tuple[str, ...]:
    """Leave out parts that are not needed, ever smaller, until no single one can be."""
    # Modules with the most others in them first: a small one is better kept than a large one.
    size = {name: sum(is_within(other, name) for other in ranked) for name in names}
    kept = sorted(names, key=lambda name: -size[name])
    part = max(1, len(kept) // 2)
    while True:
        removed = False
        for begin in range(0, len(kept), part):
            rest = kept[:begin] + kept[begin + part :]
            if rest and len(rest) < len(kept) and search(rest):
                kept, removed = rest, True
                break
        if removed:
            part = min(part, max(1, len(kept) // 2))
        elif part == 1:
            return outermost(kept)
        else:
            part = max(1, part // 2)


def _refined(names: Sequence[str], ranked: Sequence[str], search: _Search) -> tuple[str, ...]:
    """Replace a module by those within it, where they are enough."""
    kept = tuple(names)
    pending = list(kept)
    while pending:
        name = pending.pop()
        inner = outermost([other for other in ranked if other != name and is_within(other, name)])
        rest = tuple(other for other in kept if other != name)
        if name in kept and inner and search((*rest, *inner)):
            kept = _reduced((*rest, *inner), ranked, search)
            pending = [other for other in kept if other not in rest]
    return outermost(kept)
