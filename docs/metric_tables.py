"""Generator of the metric tables in docs/concepts.md and docs/guides/measure.md.

python docs/metric_tables.py
"""

import itertools
import re
from pathlib import Path

from sinklab.metrics.metric import MetricInfo
from sinklab.metrics.registry import METRIC_INFOS, OFFLINE_METRIC_INFOS

DOCS = Path(__file__).parent
PAGES = {DOCS / 'concepts.md': METRIC_INFOS, DOCS / 'guides' / 'measure.md': OFFLINE_METRIC_INFOS}
TABLE_HEAD = '| number | what it is |\n|---|---|\n'


def update_page(text: str, infos: list[MetricInfo]) -> str:
    """Return a page with its table replaced by that of the given metrics."""
    return re.sub(re.escape(TABLE_HEAD) + r'(\|.*\n)*', lambda _: TABLE_HEAD + format_rows(infos), text)


def format_rows(infos: list[MetricInfo]) -> str:
    """Return the rows of the table; consecutive metrics with the same description share a row."""
    groups = itertools.groupby(infos, lambda info: info.description)
    return ''.join(
        f'| {", ".join(map(format_name, group))} | {escape_pipes(sentence)} |\n' for sentence, group in groups
    )


def format_name(info: MetricInfo) -> str:
    return f'`{re.sub("[{}]", "", info.name)}`' + (f' ({info.unit})' if info.unit else '')


def escape_pipes(sentence: str) -> str:
    return sentence.replace('|', '\\|')


if __name__ == '__main__':
    for path, numbers in PAGES.items():
        path.write_text(update_page(path.read_text(encoding='utf-8'), numbers), encoding='utf-8')
