"""The table `[tool.mp-agent.check]` of pyproject.toml."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from mp_agent.errors import SettingError
from mp_agent.inputs.files import read_file
from mp_agent.lint.rules import BY_CODE

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_FILE_BYTES_MAX = 8 << 20
_TABLE = "tool.mp-agent.check"


class CheckSettings(BaseModel):
    """Which rules apply where. Patterns are relative to the folder of pyproject.toml."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, alias_generator=lambda name: name.replace("_", "-")
    )

    select: tuple[str, ...] = ()
    """Codes, or beginnings of codes, to apply; all where it is empty."""
    ignore: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    """Files and folders to leave out; `*` matches `/` as well."""
    per_path_ignore: dict[str, tuple[str, ...]] = Field(default_factory=dict)

    @field_validator("select", "ignore")
    @classmethod
    def _known(cls, codes: tuple[str, ...]) -> tuple[str, ...]:
        for code in codes:
            known_code(code)
        return codes

    @field_validator("per_path_ignore")
    @classmethod
    def _known_by_path(cls, paths: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        for codes in paths.values():
            cls._known(codes)
        return paths

    def excludes(self, path: str) -> bool:
        """Return whether a path, relative and with slashes, is left out."""
        return any(_matches(path, pattern) for pattern in self.exclude)

    def applies(self, code: str, path: str) -> bool:
        """Return whether findings of a rule are wanted in a file."""
        if self.select and not code.startswith(self.select):
            return False
        if self.ignore and code.startswith(self.ignore):
            return False
        return not any(
            _matches(path, pattern) and code.startswith(tuple(codes))
            for pattern, codes in self.per_path_ignore.items()
        )


def known_code(code: str) -> str:
    """Return a code, or the beginning of codes; raises ValueError for any other text."""
    if not code or not any(known.startswith(code) for known in BY_CODE):
        raise ValueError(f"{code!r} is no rule; there are {', '.join(BY_CODE)}")
    return code


def load_settings(folder: Path) -> tuple[CheckSettings, Path]:
    """Return the settings that apply to a folder, and the folder that their patterns start from.

    They come from the closest pyproject.toml with such a table, in the folder or above it.
    Raises SettingError, naming the file, the field and its value.
    """
    folder = folder.resolve()
    for candidate in (folder, *folder.parents):
        file = candidate / "pyproject.toml"
        table = _table(file) if file.is_file() else None
        if table is not None:
            return _validated(table, file), candidate
    return CheckSettings(), folder


def _table(file: Path) -> dict[str, Any] | None:
    try:
        document = tomllib.loads(read_file(file, _FILE_BYTES_MAX).decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SettingError(f"{file} cannot be read: {error}") from error
    table: Any = document
    for name in _TABLE.split("."):
        table = table.get(name) if isinstance(table, dict) else None
    if table is not None and not isinstance(table, dict):
        raise SettingError(f"{file}: {_TABLE} is {table!r}, not a table")
    return table


def _validated(table: dict[str, Any], file: Path) -> CheckSettings:
    try:
        return CheckSettings.model_validate(table)
    except ValidationError as error:
        problem = error.errors()[0]
        field = ".".join(str(part) for part in problem["loc"])
        message = problem["msg"].removeprefix("Value error, ")
        raise SettingError(f"{file}: {_TABLE}.{field} = {problem['input']!r}: {message}") from error


def merged(settings: CheckSettings, select: Iterable[str], ignore: Iterable[str]) -> CheckSettings:
    """Return the settings with what a command or a call adds; `select` replaces."""
    select, ignore = tuple(select), tuple(ignore)
    for name, codes in (("select", select), ("ignore", ignore)):
        for code in codes:
            try:
                known_code(code)
            except ValueError as error:
                raise SettingError(f"{name}: {error}") from error
    return settings.model_copy(
        update={"select": select or settings.select, "ignore": (*settings.ignore, *ignore)}
    )


def _matches(path: str, pattern: str) -> bool:
    pattern = pattern.rstrip("/")
    return fnmatchcase(path, pattern) or fnmatchcase(path, f"{pattern}/*")
