"""The status page: one HTML file with everything in it, and the policy that enforces that.

`uplot.*` are the plot library as npm has it; `python -m tools.vendor` fetches it.
"""

import base64
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from mp_agent.inputs.files import printable

if TYPE_CHECKING:
    from jinja2 import Template

_SHARED_PARTS = ("elements.js", "axes.js")
_PARTS = (*_SHARED_PARTS, "charts.js", "tables.js", "page.js")
"""The page's own script, in the order of its parts' dependencies."""


@dataclass(frozen=True, slots=True)
class Page:
    """The page's bytes, and the headers to send with it."""

    body: bytes
    headers: dict[str, str]


@cache
def status_page() -> Page:
    """Return the page. It loads nothing but `/api/v1/…` of the agent that serves it.

    Its policy names each script and style by its digest, so that text from a job which got into the
    markup still could not run.
    """
    library, library_style = plot_library()
    scripts = (library, own_script(*map(_asset, _PARTS)))
    styles = (library_style, _asset("page.css"))
    html = _asset("page.html")
    html = html.replace("<!--styles-->", "".join(f"<style>{text}</style>" for text in styles))
    html = html.replace("<!--scripts-->", "".join(f"<script>{text}</script>" for text in scripts))
    policy = content_security_policy(scripts, styles)
    headers = {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": f"{policy}; connect-src 'self'; frame-ancestors 'self'",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return Page(html.encode(), headers)


def plot_library() -> tuple[str, str]:
    """Return the plot library's script and style sheet, for a page that holds them itself."""
    return _asset("uplot.js"), _asset("uplot.css")


def plot_helpers() -> tuple[str, ...]:
    """Return the parts of the page's script that write numbers and draw axes."""
    return tuple(map(_asset, _SHARED_PARTS))


def own_script(*parts: str) -> str:
    """Return parts of a script as one, with no name of theirs visible outside."""
    joined = "\n".join(parts)
    return f'"use strict";\n(() => {{\n{joined}}})();\n'


def report_template(text: str) -> "Template":
    """Return the template of a report. What it shows is escaped, for HTML and as `printable`."""
    # Only here: nothing but the commands that write reports needs a template library.
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    return environment.from_string(text)


def _shown(value: Any) -> Any:
    # Exactly a string: what is marked as safe is the page's own.
    return printable(value, keep="\n") if type(value) is str else value


def content_security_policy(scripts: Iterable[str], styles: Iterable[str]) -> str:
    """Return a policy that lets exactly these inline scripts and styles apply."""
    return "; ".join(
        (
            "default-src 'none'",
            "img-src data:",
            f"script-src {' '.join(map(_digest, scripts))}",
            # uPlot positions its cursor with style attributes.
            f"style-src {' '.join(map(_digest, styles))}",
            "style-src-attr 'unsafe-inline'",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )


def _asset(name: str) -> str:
    return (files("mp_agent.exporters.status_page") / "assets" / name).read_text("utf-8")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
