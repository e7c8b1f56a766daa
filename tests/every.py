"""One test for a rule that every item of a catalog obeys; it names all items that do not."""

from collections.abc import Callable, Iterable, Mapping
from functools import update_wrapper
from typing import Any, TypeVar, overload

Item = TypeVar("Item")


@overload
def for_every(
    items: Mapping[str, Item],
) -> Callable[[Callable[[Item], None]], Callable[[], None]]: ...


@overload
def for_every(
    items: Iterable[Item], name: Callable[[Item], object] = str
) -> Callable[[Callable[[Item], None]], Callable[[], None]]: ...


def for_every(
    items: Any, name: Callable[[Any], object] = str
) -> Callable[[Callable[[Any], None]], Callable[[], None]]:
    """Turn the check of one item into a test of all `items`, which may not be empty.

    Items of a mapping have its keys as names, others what `name` returns. The test fails once, with
    the name of every item whose check raised, and what it raised.
    """
    pairs = (
        [*items.items()] if isinstance(items, Mapping) else [(str(name(one)), one) for one in items]
    )

    def decorate(check: Callable[[Any], None]) -> Callable[[], None]:
        def test() -> None:
            assert pairs
            problems = [f"{key}: {problem}" for key, one in pairs if (problem := _of(check, one))]
            assert problems == [], "\n".join(problems)

        update_wrapper(test, check)
        # Otherwise pytest would look for a fixture with the name of the check's parameter.
        del test.__wrapped__  # type: ignore[attr-defined]
        return test

    return decorate


def _of(check: Callable[[Any], None], item: Any) -> str:
    try:
        check(item)
    except Exception as error:  # a KeyError is a problem of its item as well
        return f"{type(error).__name__}: {error}"
    return ""
