"""Pages: one HTML file each with everything in it, and the policy that enforces that.

`assets/uplot.*` are the plot library as npm has it; `python -m tools.vendor` fetches it.
"""

import base64
import hashlib
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from mp_agent.inputs.files import printable
from mp_agent.report.content import TONES, Plots

if TYPE_CHECKING:
    from jinja2 import Environment

SHARED_SCRIPTS = ("elements.js", "axes.js")
"""They write numbers and draw axes, on the status page as well."""


def render(
    template: str,
    *,
    tool: str,
    title: str,
    verdict: str,
    good: bool,
    facts: Iterable[tuple[str, str]] = (),
    plots: Sequence[Plots] = (),
    **content: Any,
) -> str:
    """Return a report as a page. It loads nothing; its policy lets only its own scripts run.

    Whatever is shown is escaped, for HTML and as `printable`. content: what the template names.
    """
    library, library_style = plot_library()
    scripts = (library, own_script(*map(asset, (*SHARED_SCRIPTS, "plots.js"))))
    styles = (library_style, asset("page.css"))
    return (
        _templates()
        .get_template(f"{template}.html.j2")
        .render(
            policy=content_security_policy(scripts, styles),
            scripts=scripts,
            styles=styles,
            tool=tool,
            title=title,
            verdict=verdict,
            good=good,
            facts=list(facts),
            plots=plots,
            plot_data=[group.as_json() for group in plots],
            tones=TONES,
            **content,
        )
    )


@cache
def _templates() -> "Environment":
    # Only here: nothing but the commands that write reports needs a template library.
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    return Environment(
        loader=FunctionLoader(asset),
        autoescape=True,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )


def _shown(value: Any) -> Any:
    # Exactly a string: what is marked as safe is the page's own.
    return printable(value, keep="\n") if type(value) is str else value


def asset(name: str) -> str:
    """Return a template, script or style sheet of the reports."""
    return (files("mp_agent.report") / "assets" / name).read_text("utf-8")


def plot_library() -> tuple[str, str]:
    """Return the plot library's script and style sheet, for a page that holds them itself."""
    return asset("uplot.js"), asset("uplot.css")


def own_script(*parts: str) -> str:
    """Return parts of a script as one, with no name of theirs visible outside."""
    joined = "\n".join(parts)
    return f'"use strict";\n(() => {{\n{joined}}})();\n'


def content_security_policy(scripts: Iterable[str], styles: Iterable[str]) -> str:
    """Return a policy that lets exactly these inline scripts and styles apply.

    It names each by its digest, so that text from a job which got into the markup still could not
    run.
    """
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


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
