"""Cases of one test as its subtests: each fails by itself, and none is an item to collect."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest

Tested = TypeVar("Tested", bound=Callable[..., Any])

Cases = Iterable[Any] | Callable[..., Iterable[Any]]


def each(argument: str, cases: Cases) -> Callable[[Tested], Tested]:
    """Run a test, or all of a class, once with each case as `argument`.

    cases: may be a function of other arguments of the test.
    """

    def decorated(tested: Any) -> Any:
        if not inspect.isclass(tested):
            return _of_all(tested, argument, cases)
        for name, member in list(vars(tested).items()):
            if name.startswith("test_"):
                setattr(tested, name, _of_all(member, argument, cases))
        return tested

    return decorated


def _of_all(test: Callable[..., None], argument: str, cases: Cases) -> Callable[..., None]:
    def of_all(*args: object, subtests: pytest.Subtests, **arguments: Any) -> None:
        for case in _cases(cases, arguments):
            with subtests.test(getattr(case, "name", str(case))):
                test(*args, **arguments, **{argument: case})

    of_all.__doc__, of_all.__name__ = test.__doc__, test.__name__
    signature = inspect.signature(test)
    others = [value for name, value in signature.parameters.items() if name != argument]
    own = inspect.Parameter("subtests", inspect.Parameter.KEYWORD_ONLY)
    setattr(of_all, "__signature__", signature.replace(parameters=[*others, own]))  # noqa: B010
    setattr(of_all, "pytestmark", getattr(test, "pytestmark", []))  # noqa: B010
    return of_all


def _cases(cases: Cases, arguments: dict[str, Any]) -> Iterable[Any]:
    if not callable(cases):
        return cases
    return cases(*(arguments[name] for name in inspect.signature(cases).parameters))
