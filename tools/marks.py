"""Generated tables in documents that are otherwise written by hand."""


def with_table(text: str, name: str, table: str) -> str:
    """Return `text` with `table` between its marks `<!-- NAME:begin (generated) -->` and end."""
    begin, end = f"<!-- {name}:begin (generated) -->", f"<!-- {name}:end -->"
    before, found, rest = text.partition(begin)
    if not found:
        raise SystemExit(f"mark {begin} is missing")
    after = rest.partition(end)[2]
    return f"{before}{begin}\n{table}\n{end}{after}"
