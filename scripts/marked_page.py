"""Pages of the docs in which a command writes the text between two marks."""

from __future__ import annotations

from pathlib import Path


def write_between_marks(page: Path, name: str, text: str) -> None:
    """Replaces the text between the marks ``<!-- name: begin -->`` and ``<!-- name: end -->``.

    Raises:
        SystemExit: The page does not have both marks. It stays as it is.
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, found_begin, rest = page.read_text().partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        raise SystemExit(f"{page} has no line {begin!r} followed by {end!r}")
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}")
