"""Texts of unknown origin: JSON and YAML within limits, and what is safe to show of any text."""

import json
from typing import Any

from mp_agent.errors import SourceError

VALUES_MAX = 20_000_000
"""Of one text; each takes up to 100 bytes of memory."""


def printable(text: str, *, keep: str = "") -> str:
    """Return text on one line, with escapes for what a terminal or a file would interpret.

    keep: characters that stay, such as line ends.
    """
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() or one in keep else one.encode("unicode_escape").decode("ascii")
        for one in text
    )


def bounded_values(text: str, separators: str) -> str:
    """Return a text that holds at most `VALUES_MAX` values. Raises SourceError for any other.

    separators: characters of which one precedes every value but the first.
    """
    count = sum(map(text.count, separators))
    if count > VALUES_MAX:
        raise SourceError(f"holds {count} values, more than {VALUES_MAX}")
    return text


def parse_json(text: str) -> Any:
    """Return the value that a JSON text holds; NaN and Infinity may be literals in it.

    Raises SourceError, naming where it breaks off.
    """
    try:
        return json.loads(bounded_values(text, ",[{"))
    except json.JSONDecodeError as error:
        place = f"line {error.lineno} column {error.colno}"
        raise SourceError(f"{place}: is no JSON: {error.msg}") from None
    except RecursionError:
        raise SourceError("the JSON is nested too deeply") from None
    except ValueError:
        raise SourceError("the JSON holds an integer of too many digits") from None


def parse_yaml_texts(text: str) -> Any:
    """Return what a YAML text holds, with every scalar as text.

    Raises SourceError, naming the place; also for an alias, of which a few lines can make a
    document without end.
    """
    import yaml  # kept out of the memory of node agents, which read none

    class Loader(yaml.BaseLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                parser: Any = self
                mark = parser.peek_event().start_mark
                raise SourceError(f"line {mark.line + 1}: aliases are not read")
            return super().compose_node(parent, index)

    try:
        return yaml.load(text, Loader=Loader)
    except RecursionError:
        raise SourceError("the YAML is nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        place = "" if mark is None else f"line {mark.line + 1}: "
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise SourceError(f"{place}is no YAML: {problem}") from None
