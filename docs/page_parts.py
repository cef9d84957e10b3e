"""Generated parts of pages, between the markers `<!-- NAME -->` and `<!-- end -->`, and JSON of result files."""

import json
import re
from pathlib import Path
from typing import Any

END_MARKER = '<!-- end -->'


def replace_part(text: str, name: str, content: str) -> str:
    """Return a page with one part replaced.

    Args:
        text: The page.
        name: The name of the part.
        content: The new content. It stands on lines of its own if the old content does, otherwise within the line.

    Raises:
        ValueError: The page has no such part.
    """
    begin_marker = f'<!-- {name} -->'
    before, found, rest = text.partition(begin_marker)
    old, found_end, after = rest.partition(END_MARKER)
    if not found or not found_end:
        raise ValueError(f'the page has no {begin_marker} with {END_MARKER}')
    newline = '\n' if old.startswith('\n') else ''
    return f'{before}{begin_marker}{newline}{content.strip()}{newline}{END_MARKER}{after}'


def write_part(path: Path, name: str, content: str) -> None:
    """Replace one part of a page file."""
    path.write_text(replace_part(path.read_text(encoding='utf-8'), name, content), encoding='utf-8')


def format_json(results: Any) -> str:
    """Return JSON in which each list of numbers or texts is one line."""
    text = json.dumps(results, indent=1, ensure_ascii=False, allow_nan=False)
    return re.sub(r'\[[^\[\]{}]*\]', lambda match: ' '.join(match[0].split()), text) + '\n'
