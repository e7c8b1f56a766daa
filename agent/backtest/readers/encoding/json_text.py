"""JSON as trainers write it: NaN and Infinity as literals."""

import json
from typing import Any

from mp_agent.errors import LogError


def parse(text: str, where: str = "") -> Any:
    """Return the value that a JSON text holds. Raises LogError, naming where it breaks off."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno} column {error.colno}"
        raise LogError(f"{where or place}: is no JSON: {error.msg}") from None
    except RecursionError:
        raise LogError(f"{where or 'the JSON'}: is nested too deeply") from None
    except ValueError as error:
        raise LogError(f"{where or 'the JSON'}: {error}") from None
