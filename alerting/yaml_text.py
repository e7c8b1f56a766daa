"""YAML as a person would write it: keys in their order, expressions as literal blocks."""

from typing import Any

import yaml

try:
    from yaml import CSafeDumper as SafeDumper  # writes the same, in a third of the time
except ImportError:
    from yaml import SafeDumper  # type: ignore[assignment]


class _Dumper(SafeDumper):
    """Writes text of several lines as a literal block, and repeats what is shared."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def yaml_text(document: Any, heading: str, *, compact: bool = False) -> str:
    """Return `document` below `heading` as a comment; compact: innermost tables on one line."""
    comment = "".join(f"# {line}\n" for line in heading.splitlines())
    return comment + yaml.dump(
        document,
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=1000 if not compact else 10_000,
        default_flow_style=None if compact else False,
    )
