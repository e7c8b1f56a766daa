"""The configuration of Sphinx, whose sources are the repository itself."""

import os
import tomllib
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

from tools.docs_site.pages import INDEX, PATTERNS, ROOT, toctrees

_REF = os.environ.get("DOCS_REF", "main")
_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
_REPOSITORY = _PROJECT["urls"]["Repository"]

project = _PROJECT["name"]
copyright = f"the authors of {project}, {_PROJECT['license']}"
version = release = _REF.removeprefix("v")
root_doc = INDEX
include_patterns = list(PATTERNS)
exclude_patterns = [".*", "site", "benchmarks", "tests", "tools", "**/__pycache__"]
extensions = ["myst_parser"]
myst_heading_anchors = 6
highlight_language = "text"
# Names of recorded series, numbers such as 1e-06, and "…": the code is coloured as far as it goes.
suppress_warnings = ["misc.highlighting_failure"]

html_theme = "pydata_sphinx_theme"
html_title = f"{project} {version}"
html_static_path = ["static"]
html_css_files = ["site.css"]
templates_path = ["templates"]
html_copy_source = False
html_sidebars = {"**": ["pages.html"]}
html_theme_options = {
    "logo": {"text": project},
    "navbar_center": ["version.html"],
    "navbar_end": ["theme-switcher", "navbar-icon-links"],
    "github_url": _REPOSITORY,
    "secondary_sidebar_items": ["page-toc"],
    "show_toc_level": 2,
    "footer_start": ["copyright"],
    "footer_end": [],
}


def setup(app: Sphinx) -> None:
    """Derive the navigation, and lead links to what is no page to the repository."""
    app.connect("source-read", _add_navigation)
    # Before Sphinx collects files to copy.
    app.connect("doctree-read", _link_repository, priority=400)


def _add_navigation(app: Sphinx, page: str, source: list[str]) -> None:
    source[0] += toctrees(page, source[0])


def _link_repository(app: Sphinx, tree: nodes.document) -> None:
    folder = Path(app.env.doc2path(app.env.docname)).parent
    for link in list(tree.findall(lambda node: _target(node) is not None)):
        path, _, anchor = str(_target(link)).partition("#")
        target = (folder / path).resolve()
        if target.exists() and target.is_relative_to(ROOT) and not _is_page(app, target):
            within = target.relative_to(ROOT).as_posix()
            address = f"{_REPOSITORY}/blob/{_REF}/{within}" + (f"#{anchor}" if anchor else "")
            link.replace_self(nodes.reference("", "", *link.children, refuri=address))


def _target(node: nodes.Node) -> str | None:
    """Return what a node leads to by a path, None where it does not."""
    match node:
        case addnodes.download_reference():
            return str(node["reftarget"])
        case addnodes.pending_xref() if node.get("reftype") == "myst":
            return str(node["reftarget"])
        case _:
            return None


def _is_page(app: Sphinx, target: Path) -> bool:
    page: Any = app.env.path2doc(str(target))
    return page in app.env.found_docs
