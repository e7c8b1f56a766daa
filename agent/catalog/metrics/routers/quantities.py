"""What is read from the columns of routers, of all of a run and of each alike."""

from collections.abc import Callable, Mapping

Columns = Mapping[str, float]
Quantity = Callable[[Columns], float | None]


def entropy(values: Columns) -> float | None:
    """Return the mean entropy of a token, divided by the logarithm of the number of experts."""
    tokens = values.get("entropy_tokens", 0.0)
    total = values.get("entropy_sum")
    # Rounding may carry an even distribution beyond 1.
    return None if total is None or tokens <= 0.0 else min(total / tokens, 1.0)


def unused_experts(values: Columns) -> float | None:
    """Return the share of the experts that no token was routed to, over the ranks on average."""
    experts = values.get("experts", 0.0)
    return values.get("unused_experts", 0.0) / experts if experts > 0.0 else None


def dropped(values: Columns) -> float | None:
    """Return the share of the choices that were beyond an expert's capacity; None without one."""
    choices = values.get("limited_choices", 0.0)
    return values.get("dropped_choices", 0.0) / choices if choices > 0.0 else None
