"""Write the tables of numbers in docs/concepts.md and docs/guides/measure.md from the table of measures.

python docs/number_table.py
"""

import itertools
import re
from pathlib import Path

from sinklab.measure.measure import Number
from sinklab.measure.table import DEEPER_NUMBERS, NUMBERS

DOCS = Path(__file__).parent
PAGES = {DOCS / 'concepts.md': NUMBERS, DOCS / 'guides' / 'measure.md': DEEPER_NUMBERS}
HEAD = '| number | what it is |\n|---|---|\n'


def page(text: str, numbers: list[Number]) -> str:
    """A page with the table as it is now."""
    return re.sub(re.escape(HEAD) + r'(\|.*\n)*', lambda _: HEAD + rows(numbers), text)


def rows(numbers: list[Number]) -> str:
    """Neighbours of one sentence share a row."""
    groups = itertools.groupby(numbers, lambda number: number.sentence)
    return ''.join(f'| {", ".join(map(name, group))} | {escape(sentence)} |\n' for sentence, group in groups)


def name(number: Number) -> str:
    return f'`{re.sub("[{}]", "", number.name)}`' + (f' ({number.unit})' if number.unit else '')


def escape(sentence: str) -> str:
    return sentence.replace('|', '\\|')


if __name__ == '__main__':
    for path, numbers in PAGES.items():
        path.write_text(page(path.read_text(encoding='utf-8'), numbers), encoding='utf-8')
