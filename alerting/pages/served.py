"""Runbooks outside the repository: for a browser, from a node agent, and for a terminal."""

import re
from functools import cache
from typing import TYPE_CHECKING

from mp_agent.alerting.condition import Condition
from mp_agent.alerting.conditions import CONDITIONS
from mp_agent.alerting.links import page_file
from mp_agent.alerting.pages import GENERATED, markdown_table, render_runbook
from mp_agent.alerting.values import Values
from mp_agent.report.page import asset, content_security_policy

if TYPE_CHECKING:
    from markdown_it import MarkdownIt

_BY_FILE = {page_file(condition.name): condition for condition in CONDITIONS}
PREFIX = "MpAgent"
"""Begins the name of every alert."""
_OUTWARD = re.compile(r"\[([^\]]+)\]\(\.\./[^)]*\)")
"""Links to files that only the repository has."""
_STYLE = """
main { max-width: 860px; }
table { border-collapse: collapse; }
th, td { border: 1px solid var(--line); padding: 4px 10px; text-align: left; }
pre { overflow-x: auto; background: var(--page); padding: 10px 14px; border-radius: 8px; }
section h2 { margin-top: 24px; }
"""


def condition_named(name: str) -> Condition | None:
    """Return the condition of an alert's name, in any case, with or without `MpAgent` and `.md`."""
    file = f"{name.lower().removesuffix('.md')}.md"
    return _BY_FILE.get(file) or _BY_FILE.get(f"{PREFIX.lower()}{file}")


def runbook_text(condition: Condition, values: Values) -> str:
    """Return the runbook as Markdown, with the numbers in force and no link into a repository."""
    text = render_runbook(condition, values).removeprefix(GENERATED).lstrip()
    return _OUTWARD.sub(r"\1", text)


def index_text() -> str:
    """Return the list of all runbooks as Markdown, each with a link next to it."""
    rows = [
        (
            f"[{condition.name}]({page_file(condition.name)})",
            ", ".join(level.severity.value for level in condition.levels),
            condition.summary,
        )
        for condition in CONDITIONS
    ]
    return f"# Runbooks\n\n{markdown_table(('alert', 'severity', 'what'), rows)}\n"


def as_page(title: str, text: str) -> str:
    """Return Markdown as a page that loads nothing and runs nothing."""
    styles = (asset("page.css"), _STYLE)
    policy = content_security_policy((), styles)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title>{''.join(f'<style>{style}</style>' for style in styles)}</head>"
        f"<body><main><section>\n{_converter().render(text)}</section></main></body></html>\n"
    )


@cache
def _converter() -> "MarkdownIt":
    # Only here: an agent that is not asked for a runbook needs no Markdown.
    from markdown_it import MarkdownIt

    return MarkdownIt("commonmark").enable("table")
