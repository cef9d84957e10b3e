"""Tables of docs/results/claims.md and of the README, from the measurements in docs/results.

    python -m docs.claims_results

The parts of the pages between markers are generated from claims.json (size quickstart) and claims_small.json (size
small) and, for pretrained models, from open_models.json.
"""

import functools
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from docs import open_model_results
from docs.reference import format_table
from sinklab.cli import claims as claims_command
from sinklab.cli import config_flags
from sinklab.configs import model_size, open_models
from sinklab.escape import escape_markdown
from sinklab.report import claims as report
from sinklab.report.statistics import MIN_SAMPLES
from sinklab.sweep import results

ROOT = Path(__file__).parents[1]
RESULTS_DIR = ROOT / 'docs' / 'results'
SIZES = {'quickstart': '0.2M', 'small': '1.8M'}  # {size: parameters, with embeddings}
RESULT_FILES = {'quickstart': 'claims.json', 'small': 'claims_small.json'}

# Statements of configs/open_models.py that are about a claim: {claim: (experiment, texts)}.
OPEN_MODEL_STATEMENTS = {
    'emerges': ('inputs', ('Natural text has a sink.',)),
    'spikes': ('spikes', ('A text has massive activations.',)),
    'domains': (
        'domains',
        tuple(f'The domain hardly matters: {domain}.' for domain in ('code', 'logs', 'german', 'japanese')),
    ),
    'streaming': ('streaming', ('Without the first token it breaks.', 'One first token is enough.')),
}
NO_VERDICT = 'no verdict'  # fewer than MIN_SAMPLES seeds
UNIT_OF_LABEL = {'loss of': 'nats', 'fails of': 'of runs'}  # other differences are percentage points or ratios
README_CLAIMS = {
    'emerges': 'softmax',
    'sigmoid': 'sigmoid without a normalizer',
    'sigmoid_apple': 'sigmoid with an offset of -log T',
    'sigmoid_normalized': 'sigmoid with a normalizer',
    'elu1': 'elu + 1 without a normalizer',
    'column_k': 'a learned key besides the text',
    'column_v': 'a learned value besides the text',
    'rate_lower': 'half the learning rate',
    'decay_more': 'five times the weight decay',
    'batch_small': 'a quarter of the batch',
}


@functools.cache
def load_verdicts(files: tuple[tuple[str, str], ...], config: str = 'configs/claims.py') -> dict[str, dict]:
    """Return {size: {claim: entry of its verdict}}."""
    claim_table = config_flags.load_config_module(config, 'CLAIMS').CLAIMS
    entries = {}
    for size, name in files:
        claims = report.parse_claims(claim_table, size)
        claims_data = results.read_results(RESULTS_DIR / name)
        entries[size] = {entry['claim']: entry for entry in claims_command.compute_verdicts(claims, claims_data)}
    return entries


def load_claim_verdicts() -> dict[str, dict]:
    return load_verdicts(tuple(RESULT_FILES.items()))


def load_hypothesis_verdicts() -> dict[str, dict]:
    return load_verdicts(tuple(RESULT_FILES.items()), 'configs/hypotheses.py')


def format_cell(entry: dict) -> str:
    """Format the verdict at a size, with the mean difference, its interval and the number of seeds.

    With too few seeds for an interval, the cell has the range of the differences instead.
    """
    if entry['verdict'] in ('not run', 'not testable here'):
        return '' if entry['verdict'] == 'not run' else 'not testable'
    values = list(entry['differences'].values())
    unit = next((f' {unit}' for label, unit in UNIT_OF_LABEL.items() if entry['contrast'].startswith(label)), '')
    if not values:
        return '**diverged**'
    if len(values) < MIN_SAMPLES:
        spread = f'{min(values):+.2f} to {max(values):+.2f}, ' if len(values) > 1 else ''
        return f'{NO_VERDICT}<br>{np.mean(values):+.2f}{unit} ({spread}n = {len(values)})'
    verdict = report.format_verdict(entry)
    return f'**{verdict}**<br>{report.format_mean_and_interval(entry)}{unit} (n = {len(values)})'


def format_open_models(claim: str) -> str:
    """Format what pretrained models show about a claim, or an empty string."""
    experiments = open_model_results.load_results()['experiments']
    if claim == 'size':
        rates = {
            name: open_model_results.read_operand(('natural', 'sink/1'), entry)
            for name, entry in experiments['size'].items()
        }
        return '; '.join(f'{escape_markdown(name)}: Sink_1 {rate:.1f} %' for name, rate in rates.items())
    if claim not in OPEN_MODEL_STATEMENTS:
        return ''
    experiment, texts = OPEN_MODEL_STATEMENTS[claim]
    statements = [
        statement for statement in open_models.EXPERIMENTS[experiment]['statements'] if statement['text'] in texts
    ]
    judged = [
        open_model_results.judge_statement(statement, entry)
        for statement in statements
        for entry in experiments[experiment].values()
    ]
    return f'{sum(text.startswith("holds") for text in judged)} of {len(judged)} statements hold'


def format_claim_table(entries_by_size: Mapping[str, dict], with_open_models: bool = True) -> str:
    """Format one line for each claim that has a result, contradicted claims first."""
    sizes = list(entries_by_size)

    def get_rank(name: str) -> int:
        return min(report.VERDICTS.index(entries_by_size[size][name]['verdict']) for size in sizes)

    rows = []
    for name in sorted(entries_by_size[sizes[0]], key=get_rank):
        entries = [entries_by_size[size][name] for size in sizes]
        open_model_cell = format_open_models(name) if with_open_models else ''
        cells = [format_cell(entry) for entry in entries]
        if not any(cells):
            continue
        contrast = next((entry['contrast'] for entry in entries if entry['contrast']), '')
        reason = entries[0]['why'] if all(entry['why'] for entry in entries) else ''
        words = f'`{name}`: {escape_markdown(entries[0]["words"])} ({escape_markdown(entries[0]["source"])})<br>'
        rows.append(
            [
                words + escape_markdown(contrast or reason),
                report.format_signed(entries[0]['published']),
                *cells,
                *([open_model_cell] if with_open_models else []),
            ]
        )
    headings = ['claim', 'paper', *(f'{SIZES[size]} ({size})' for size in sizes)]
    return format_table([*headings, *(['pretrained models'] if with_open_models else [])], rows)


def format_summary(entries_by_size: Mapping[str, dict]) -> str:
    """Format the counts of verdicts and the sign test of each size."""
    lines = []
    for size, entries in entries_by_size.items():
        tested = list(entries.values())
        few = [entry for entry in tested if 0 < len(entry['differences']) < MIN_SAMPLES]
        counts = report.format_counts([entry for entry in tested if entry not in few])
        signs = [report.orient_mean(entry) > 0 for entry in few if entry['way'] != '=']
        few_text = (
            f' {len(few)} more have fewer than {MIN_SAMPLES} seeds and therefore no verdict; of {len(signs)} of them '
            f'that claim a direction, {sum(signs)} have a mean on the claimed side.'
            if few
            else ''
        )
        lines.append(f'- **{SIZES[size]} ({size})**: {counts}{few_text} {report.format_sign_test(tested)}\n')
    return ''.join(lines)


def list_values(claims_data: dict, row: str, metric: str) -> list[float]:
    """List the values of a metric at the end of all runs of a row."""
    runs = results.expand_same_rows(claims_data).get(row, {}).values()
    return [run['end'][metric] for run in runs if metric in run['end']]


def format_size_table(claims_data: dict) -> str:
    """Format Sink_1, the step of emergence, the loss and the norm ratio of each model size."""
    rows = []
    for suffix, tokens in (('', 'in proportion'), ('_equal_tokens', 'equal')):
        for name in model_size.SHAPES:
            row = 'model_size:1.3m' if name == model_size.REFERENCE else f'model_size:{name}{suffix}'
            sinks = list_values(claims_data, row, 'sink/1')
            if not sinks:
                continue
            losses = list_values(claims_data, row, 'valid/loss')
            steps = list_values(claims_data, row, 'emergence/step')
            rows.append(
                [
                    f'{name.upper()}',
                    tokens,
                    ', '.join(f'{sink:.1f}' for sink in sinks),
                    ', '.join(f'{step:.0f}' for step in steps) or 'none',
                    f'{np.mean(losses):.2f}',
                ]
            )
    return format_table(['parameters', 'tokens', 'Sink_1 of each seed (%)', 'step of emergence', 'loss'], rows)


def fit_size_slope(claims_data: dict, suffix: str) -> tuple[float, float, int]:
    """Fit Sink_1 over log10 of the parameters, by least squares over all runs.

    Returns:
        The slope in percentage points for a factor of 10, its standard error, and the number of runs.
    """
    points = []
    for name, shape in model_size.SHAPES.items():
        row = 'model_size:1.3m' if name == model_size.REFERENCE else f'model_size:{name}{suffix}'
        sinks = list_values(claims_data, row, 'sink/1')
        points += [(np.log10(model_size.count_millions(shape)), sink) for sink in sinks]
    x, y = np.array(points).T
    design = np.stack([x, np.ones_like(x)], 1)
    solution, *_ = np.linalg.lstsq(design, y, rcond=None)
    variance = np.sum((y - design @ solution) ** 2) / (len(x) - 2) * np.linalg.inv(design.T @ design)[0, 0]
    return float(solution[0]), float(np.sqrt(variance)), len(x)


def format_size_section() -> str:
    claims_data = results.read_results(RESULTS_DIR / RESULT_FILES['small'])
    lines = [format_size_table(claims_data).rstrip(), '']
    for suffix, tokens in (('', 'tokens in proportion'), ('_equal_tokens', 'equal tokens')):
        slope, error, runs = fit_size_slope(claims_data, suffix)
        lines.append(
            f'- With {tokens}: {slope:+.1f} ± {error:.1f} percentage points for ten times the parameters '
            f'({runs} runs; the standard error of a straight line).'
        )
    return '\n'.join(lines) + '\n'


def format_readme_table(entries_by_size: Mapping[str, dict]) -> str:
    data = {size: results.read_results(RESULTS_DIR / name) for size, name in RESULT_FILES.items()}
    published = claims_command.collect_published_numbers(
        report.parse_claims(config_flags.load_config_module('configs/claims.py', 'CLAIMS').CLAIMS)
    )
    claim_table = config_flags.load_config_module('configs/claims.py', 'CLAIMS').CLAIMS
    rows = []
    for name, model in README_CLAIMS.items():
        row, metric = claim_table[name]['of'][:2]
        number = published[row].get(metric)
        cells = []
        for size in SIZES:
            sinks = list_values(data[size], row, metric)
            entry = entries_by_size[size][name]
            if not sinks:
                cells += ['', '']
                continue
            spread = f' ± {np.std(sinks, ddof=1):.1f}' if len(sinks) > 1 else ''
            verdict = NO_VERDICT if 0 < len(entry['differences']) < MIN_SAMPLES else entry['verdict']
            cells += [f'{np.mean(sinks):.1f}{spread} ({len(sinks)})', verdict]
        rows.append([model, f'`{name}`', '' if number is None else f'{number:.1f}', *cells])
    headings = ['model', 'claim', 'paper, 60M']
    for parameters in SIZES.values():
        headings += [f'ours, {parameters} (seeds)', 'verdict']
    return format_table(headings, rows)


def format_status(entries_by_size: Mapping[str, dict]) -> str:
    """Format the counts of verdicts at the quickstart's size as one sentence."""
    return report.format_counts(list(entries_by_size['quickstart'].values())).rstrip('.')


PARTS = {
    'summary': lambda: format_summary(load_claim_verdicts()),
    'table': lambda: format_claim_table(load_claim_verdicts()),
    'hypotheses': lambda: format_claim_table(load_hypothesis_verdicts(), with_open_models=False),
    'sizes': format_size_section,
    'readme': lambda: format_readme_table(load_claim_verdicts()),
    'status': lambda: format_status(load_claim_verdicts()) + '\n',
}
PAGES = {
    RESULTS_DIR / 'claims.md': ('summary', 'table', 'hypotheses', 'sizes'),
    ROOT / 'README.md': ('readme',),
}


def update_page(text: str, parts: tuple[str, ...]) -> str:
    """Return a page with its generated parts replaced."""
    for part in parts:
        begin, end = f'<!-- claims: {part} -->', '<!-- end -->'
        pattern = re.compile(f'{re.escape(begin)}\n.*?{re.escape(end)}', re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f'the page has no {begin}')
        content = f'{begin}\n{PARTS[part]().strip()}\n{end}'
        text = pattern.sub(lambda match: content, text)  # noqa: B023
    return text


def main() -> None:
    for path, parts in PAGES.items():
        path.write_text(update_page(path.read_text(encoding='utf-8'), parts), encoding='utf-8')


if __name__ == '__main__':
    main()
