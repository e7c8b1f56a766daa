"""Comments that silence findings: `# mp-agent: ignore[MP101]`, `# mp-agent: ignore-file[MP117]`."""

import re

from mp_agent.lint.finding import Span
from mp_agent.lint.source.text import SourceText

_COMMENT = re.compile(r"#\s*mp-agent:\s*ignore(-file)?(?:\[([^\]]*)\])?(?![\w\[-])")


class Suppressions:
    """What the comments of one file silence."""

    def __init__(self, source: SourceText) -> None:
        self._of_file: list[frozenset[str]] = []
        self._of_line: dict[int, list[frozenset[str]]] = {}
        if "mp-agent:" not in source.text:
            return
        for number, line in enumerate(source.lines, 1):
            for match in _COMMENT.finditer(line):
                codes = frozenset(re.findall(r"\w+", match.group(2) or ""))
                if match.group(1):
                    self._of_file.append(codes)
                else:
                    self._of_line.setdefault(number, []).append(codes)

    def silence(self, span: Span, code: str) -> bool:
        """Return whether a comment on the first or the last line, or for the file, names a code.

        A comment without codes stands for all of them.
        """
        lines = (self._of_line.get(number, []) for number in (span.line, span.end_line))
        named = [*self._of_file, *(codes for line in lines for codes in line)]
        return any(not codes or code in codes for codes in named)
