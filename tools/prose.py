"""Check documents, docstrings, messages and identifiers against a list of phrases to avoid.

`python -m tools.prose` prints each use as `file:line: "phrase": write …` and returns 1 if there is
any. Inline code and code blocks are not prose; an identifier is, word by word, where it is defined.
The list is tools/prose.toml.
"""

import argparse
import ast
import io
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RULES = Path(__file__).with_name("prose.toml")

_FENCE = re.compile(r"^ *```")
_CODE = re.compile(r"`[^`\n]*`|\]\([^)]*\)|<[^>\n]*>|https?://\S+")
_WORDS = 3
"""A string literal with fewer words is a name or a key rather than a message."""
_WORD_BOUNDARY = re.compile(r"_+|(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A phrase to avoid. `pending` rules do not fail the check yet."""

    pattern: re.Pattern[str]
    instead: str
    pending: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One use of a phrase. `path` is relative to the root, `line` counts from 1."""

    path: Path
    line: int
    phrase: str
    rule: Rule

    def __str__(self) -> str:
        return f'{self.path}:{self.line}: "{self.phrase}": write {self.rule.instead}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """The rules, and globs of the files that they hold for."""

    rules: Sequence[Rule]
    files: Mapping[str, Sequence[str]]


def read_configuration(path: Path = RULES) -> Configuration:
    """Return the rules in `path`; SystemExit naming the rule and key that is wrong."""
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    return Configuration(
        rules=[_rule(number, entry) for number, entry in enumerate(table["rule"], start=1)],
        files=table["files"],
    )


def findings(configuration: Configuration, root: Path = ROOT) -> Iterator[Finding]:
    """Yield every use of a phrase below `root`, file by file."""
    excluded = _matching(root, configuration.files.get("except", ()))
    for kind, texts_of in (("markdown", _markdown_file), ("python", _python_file)):
        for path in sorted(_matching(root, configuration.files[kind]) - excluded):
            for line, text in texts_of(path):
                for rule, at, phrase in uses(configuration.rules, text):
                    yield Finding(
                        path=path.relative_to(root), line=line + at, phrase=phrase, rule=rule
                    )


def uses(rules: Sequence[Rule], text: str) -> Iterator[tuple[Rule, int, str]]:
    """Yield each rule broken by `text`, with the lines before it and the words found."""
    prose = _CODE.sub(lambda found: " " * len(found[0]), text)
    for rule in rules:
        for found in rule.pattern.finditer(prose):
            yield rule, prose.count("\n", 0, found.start()), " ".join(found[0].split())


def markdown_texts(page: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a page that are outside code blocks, by paragraph, with line numbers."""
    begin, paragraph, fenced = 1, list[str](), False
    for number, line in enumerate([*page.splitlines(), ""], start=1):
        fence = _FENCE.match(line) is not None
        if fence or fenced or not line.strip():
            if paragraph:
                yield begin, "\n".join(paragraph)
            paragraph = []
            fenced ^= fence
        else:
            begin = begin if paragraph else number
            paragraph.append(line)


def python_texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield string literals that hold sentences, and comments, with their line numbers."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
            continue
        if len(node.value.split()) >= _WORDS:
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def python_names(source: str) -> Iterator[tuple[int, str]]:
    """Yield each name that a module defines, first as it is, then as its words, with line numbers.

    Names are defined as function, class, argument, variable, attribute or alias.
    """
    lines: dict[str, int] = {}
    for node in ast.walk(ast.parse(source)):
        if name := _defined_name(node):
            lines.setdefault(name, getattr(node, "lineno", 1))
    for name, line in lines.items():
        yield from _name_texts(line, name)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what is found; return 1 if a rule that is not pending is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pending", action="store_true", help="report pending rules as well")
    pending = parser.parse_args(arguments).pending
    configuration = read_configuration()
    count = 0
    for finding in findings(configuration):
        if pending or not finding.rule.pending:
            print(finding)
        count += not finding.rule.pending
    if count:
        print(f"{count} phrases to replace, see tools/prose.toml", file=sys.stderr)
    return int(count > 0)


def _markdown_file(path: Path) -> Iterator[tuple[int, str]]:
    return markdown_texts(path.read_text(encoding="utf-8"))


def _python_file(path: Path) -> Iterator[tuple[int, str]]:
    source = path.read_text(encoding="utf-8")
    yield from _name_texts(1, path.stem)
    yield from python_texts(source)
    yield from python_names(source)


def _defined_name(node: ast.AST) -> str | None:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.ExceptHandler():
            return node.name
        case ast.arg():
            return node.arg
        case ast.alias():
            return node.asname
        case ast.Name(ctx=ast.Store()):
            return node.id
        case ast.Attribute(ctx=ast.Store()):
            return node.attr
    return None


def _name_texts(line: int, name: str) -> Iterator[tuple[int, str]]:
    words = _WORD_BOUNDARY.sub(" ", name).strip()
    yield line, name
    if words not in ("", name):
        yield line, words


def _rule(number: int, entry: Mapping[str, Any]) -> Rule:
    known = {"phrase", "instead", "pending"}
    if wrong := set(entry) - known or {"phrase", "instead"} - set(entry):
        raise SystemExit(f"tools/prose.toml: rule {number}: wrong or missing key {min(wrong)!r}")
    try:
        words = entry["phrase"].replace(" ", r"\s+")
        pattern = re.compile(rf"(?<![\w-])(?:{words})(?![\w-])", re.IGNORECASE)
    except re.error as error:
        raise SystemExit(f"tools/prose.toml: rule {number}: phrase: {error}") from None
    return Rule(pattern=pattern, instead=entry["instead"], pending=entry.get("pending", False))


def _matching(root: Path, globs: Sequence[str]) -> set[Path]:
    return {path for glob in globs for path in root.glob(glob) if path.is_file()}


if __name__ == "__main__":
    sys.exit(main())
