"""Checks of the policies that a user chose, and of their parameters."""

from collections.abc import Iterator, Mapping

from mp_agent.catalog.guard.policies import POLICIES, POLICIES_BY_NAME
from mp_agent.catalog.guard.policy import Values
from mp_agent.errors import CatalogError


def with_defaults(given: Mapping[str, Values]) -> dict[str, dict[str, float | str]]:
    """Return policies with all their parameters, in the order of `POLICIES`.

    Raises CatalogError, naming the policy and the parameter, for what is unknown or wrong.
    """
    for name, values in given.items():
        for problem in _problems(name, values):
            raise CatalogError(problem)
    return {
        policy.name: {**policy.defaults, **given[policy.name]}
        for policy in POLICIES
        if policy.name in given
    }


def default_policies() -> dict[str, dict[str, float | str]]:
    """Return what `guard=True` stands for."""
    return with_defaults({policy.name: {} for policy in POLICIES if policy.by_default})


def _problems(name: str, values: Values) -> Iterator[str]:
    policy = POLICIES_BY_NAME.get(name)
    if policy is None:
        yield f"{name!r} is unknown; known: {', '.join(POLICIES_BY_NAME)}"
        return
    if not isinstance(values, Mapping):
        yield f"{name} is {values!r}: must be a table of parameters"
        return
    parameters = {parameter.name: parameter for parameter in policy.parameters}
    for key, value in values.items():
        if key not in parameters:
            yield f"{name} has no {key!r}; it has: {', '.join(parameters)}"
        elif problem := parameters[key].problem(value):
            yield f"{name}.{key} is {value!r}: {problem}"
    counts = {**policy.defaults, **values}
    if "troubles" in counts and float(counts["troubles"]) > float(counts["trouble_steps"]):
        yield (
            f"{name}.troubles is {counts['troubles']}, {name}.trouble_steps is "
            f"{counts['trouble_steps']}: there are never so many within so few steps"
        )
