"""Build the site of one version next to those that are there, and the list of versions."""

import argparse
import os
import re
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from sphinx.cmd.build import build_main

from tools.docs_site.pages import INDEX, ROOT

_RELEASE = re.compile(r"\d+\.\d+\.\d+")


def build(folder: Path, ref: str) -> int:
    """Build the pages as the repository has them at `ref`; a warning is an error.

    Returns Sphinx' exit status.
    """
    os.environ["DOCS_REF"] = ref
    configuration = Path(__file__).parent
    options = ["-q", "-W", "--keep-going", "-E", "-b", "html", "-c", str(configuration)]
    with TemporaryDirectory() as doctrees:
        status: int = build_main([*options, "-d", doctrees, str(ROOT), str(folder)])
    return status


def list_versions(site: Path) -> None:
    """Make `latest/` the newest release, or `main/` while there is none, and list what is there."""
    names = [folder.name for folder in site.iterdir() if folder.is_dir()]
    releases = sorted(filter(_RELEASE.fullmatch, names), key=_numbers, reverse=True)
    newest = releases[0] if releases else "main"
    shutil.rmtree(site / "latest", ignore_errors=True)
    shutil.copytree(site / newest, site / "latest")
    listed = [*releases, *(["main"] if "main" in names else [])]
    items = "".join(
        f'<li><a href="{name}/{INDEX}.html">{name}</a>{" (latest)" if name == newest else ""}</li>'
        for name in listed
    )
    (site / "versions.html").write_text(_page("", f"<h1>Versions</h1><ul>{items}</ul>"))
    front = f"latest/{INDEX}.html"
    refresh = f'<meta http-equiv="refresh" content="0; url={front}">'
    (site / "index.html").write_text(_page(refresh, f'<a href="{front}">Documentation</a>'))


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))


def _page(head: str, body: str) -> str:
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><meta name="color-scheme" '
        f'content="light dark"><title>mp-agent</title>{head}</head>'
        f'<body style="font-family: sans-serif; margin: 2rem">{body}</body></html>\n'
    )


def main() -> int:
    """Build and list; return Sphinx' exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.docs_site", description=__doc__)
    parser.add_argument("ref", nargs="?", default="main", help="the tag of a release: v1.2.3")
    parser.add_argument(
        "--site", type=Path, default=ROOT / "site", help="the folder of all versions"
    )
    given = parser.parse_args()
    ref: str = given.ref
    site: Path = given.site
    folder = site / ref.removeprefix("v")
    shutil.rmtree(folder, ignore_errors=True)
    if status := build(folder, ref):
        return status
    list_versions(site)
    print(site / "index.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())
