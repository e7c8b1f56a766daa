"""The page itself: one HTML file with everything in it, and the policy that keeps it so."""

import base64
import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

_LIBRARY = "uplot.js"
"""uPlot as npm has it; `python -m tools.vendor` fetches it."""
_PARTS = ("elements.js", "charts.js", "tables.js", "page.js")
"""The page's own script, in the order in which its parts need each other."""
_STYLES = ("uplot.css", "page.css")


@dataclass(frozen=True, slots=True)
class Page:
    """The page's bytes, and the headers to send with it."""

    body: bytes
    headers: dict[str, str]


@cache
def status_page() -> Page:
    """Return the page. It loads nothing but `/api/v1/…` of the agent that serves it.

    The policy names each script and style by its digest, so that text from a job that would slip
    through as markup could still not run.
    """
    own = "\n".join(_asset(name) for name in _PARTS)
    scripts = [_asset(_LIBRARY), f'"use strict";\n(() => {{\n{own}}})();\n']
    styles = [_asset(name) for name in _STYLES]
    html = _asset("page.html")
    html = html.replace("<!--styles-->", "".join(f"<style>{text}</style>" for text in styles))
    html = html.replace("<!--scripts-->", "".join(f"<script>{text}</script>" for text in scripts))
    policy = "; ".join(
        (
            "default-src 'none'",
            "connect-src 'self'",
            "img-src data:",
            f"script-src {' '.join(map(_digest, scripts))}",
            # uPlot places its cursor by style attributes.
            f"style-src {' '.join(map(_digest, styles))}",
            "style-src-attr 'unsafe-inline'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'self'",
        )
    )
    headers = {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return Page(html.encode(), headers)


def _asset(name: str) -> str:
    return (files("mp_agent.exporters.status_page") / "assets" / name).read_text("utf-8")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
