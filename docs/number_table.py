"""Writes the README's table of numbers from the table of measures.

python docs/number_table.py
"""

import itertools
import re
from pathlib import Path

from sinklab.measure.measure import Number
from sinklab.measure.table import NUMBERS

README = Path(__file__).parents[1] / 'README.md'
HEAD = '| number | what it is |\n|---|---|\n'


def readme(text: str) -> str:
    """A README with the table as it is now."""
    return re.sub(re.escape(HEAD) + r'(\|.*\n)*', lambda _: HEAD + rows(), text)


def rows() -> str:
    """Neighbours of one sentence share a row."""
    groups = itertools.groupby(NUMBERS, lambda number: number.sentence)
    return ''.join(f'| {", ".join(map(name, group))} | {escape(sentence)} |\n' for sentence, group in groups)


def name(number: Number) -> str:
    return f'`{number.name.format(k="k")}`' + (f' ({number.unit})' if number.unit else '')


def escape(sentence: str) -> str:
    return sentence.replace('|', '\\|')


if __name__ == '__main__':
    README.write_text(readme(README.read_text(encoding='utf-8')), encoding='utf-8')
