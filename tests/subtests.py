"""Cases of one test as its subtests: each fails by itself, and none is an item to collect."""

from collections.abc import Callable, Iterable
from inspect import Parameter, Signature, isclass, signature
from types import FunctionType
from typing import Any, TypeVar, cast

import pytest

Tested = TypeVar("Tested", bound=Callable[..., Any])

Cases = Iterable[Any] | Callable[..., Iterable[Any]]


def each(names: str | tuple[str, ...], cases: Cases) -> Callable[[Tested], Tested]:
    """Run a test, or all of a class, once with each case, as `pytest.mark.parametrize` does.

    All cases share the fixtures of one test. names: of the argument, or arguments, that a case is.
    cases: may be a function of other arguments of the test.
    """

    def decorated(tested: Any) -> Any:
        if not isclass(tested):
            return _of_all(tested, names, cases)
        for name, member in list(vars(tested).items()):
            if name.startswith("test_"):
                setattr(tested, name, _of_all(member, names, cases))
        return tested

    return decorated


def _of_all(
    test: Callable[..., None], names: str | tuple[str, ...], cases: Cases
) -> Callable[..., None]:
    parameters = signature(test).parameters

    def of_all(*args: object, subtests: pytest.Subtests, **arguments: Any) -> None:
        if "subtests" in parameters:
            arguments["subtests"] = subtests
        found = list(_cases(cases, arguments))
        assert found, "there is no case"
        for case in found:
            own = {names: case} if isinstance(names, str) else dict(zip(names, case, strict=True))
            with subtests.test(getattr(case, "name", str(case))):
                test(*args, **arguments, **own)

    of_all.__doc__, of_all.__name__ = test.__doc__, test.__name__
    given = {"subtests", *((names,) if isinstance(names, str) else names)}
    others = [value for name, value in parameters.items() if name not in given]
    own = Parameter("subtests", Parameter.KEYWORD_ONLY)
    setattr(of_all, "__signature__", Signature([*others, own]))  # noqa: B010
    setattr(of_all, "pytestmark", getattr(test, "pytestmark", []))  # noqa: B010
    return of_all


def _cases(cases: Cases, arguments: dict[str, Any]) -> Iterable[Any]:
    # Not whatever can be called: a class of enumeration can, and holds cases.
    if isinstance(cases, FunctionType):
        found: Iterable[Any] = cases(*map(arguments.__getitem__, signature(cases).parameters))
        return found
    return cast("Iterable[Any]", cases)
