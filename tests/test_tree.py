"""Tests lie in the folder of the part that they test, or in one of their own subject."""

from pathlib import Path

_ROOT = Path(__file__).parents[1]
_TOPS = ("agent", "alerting", "exporters", "grafana", "tools")
_SUBJECTS = {"examples", "noise", "pages", "real_runs", "scenarios"}


def test_folders_of_tests_are_those_of_the_product() -> None:
    folders = {path.parent for top in _TOPS for path in (_ROOT / "tests" / top).rglob("test_*.py")}
    parts = [folder.relative_to(_ROOT / "tests") for folder in sorted(folders)]
    assert len(parts) > 40
    strays = [
        str(part)
        for part in parts
        if part.name not in _SUBJECTS
        and not (_ROOT / part).is_dir()
        and not (_ROOT / part).with_suffix(".py").is_file()
    ]
    assert strays == []
