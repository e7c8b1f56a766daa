"""The status page: one HTML file with everything in it."""

from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from mp_agent.report.page import (
    SHARED_SCRIPTS,
    asset,
    content_security_policy,
    own_script,
    plot_library,
)

_PARTS = ("charts.js", "tables.js", "page.js")
"""The page's own script after what it shares, in the order of its parts' dependencies."""


@dataclass(frozen=True, slots=True)
class Page:
    """The page's bytes, and the headers to send with it."""

    body: bytes
    headers: dict[str, str]


@cache
def status_page() -> Page:
    """Return the page. It loads nothing but `/api/v1/…` of the agent that serves it."""
    library, library_style = plot_library()
    scripts = (library, own_script(*map(asset, SHARED_SCRIPTS), *map(_asset, _PARTS)))
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


def _asset(name: str) -> str:
    return (files("mp_agent.exporters.status_page") / "assets" / name).read_text("utf-8")
