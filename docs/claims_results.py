"""Tables and picture of docs/results/claims.md, and verdicts in other pages, from docs/results/claims*.json.

    python -m docs.claims_results

The parts of the pages between markers are generated from claims.json (size quickstart), claims_small.json (size
small) and, for pretrained models, from open_models.json.
"""

import functools
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from scipy import stats

from docs import open_model_results
from docs.page_parts import replace_part
from docs.reference import format_table
from sinklab.cli import claims as claims_command
from sinklab.cli import config_flags
from sinklab.configs import claims as claim_definitions
from sinklab.configs import hypotheses, model_size, open_models
from sinklab.escape import escape_markdown
from sinklab.metrics.emergence import has_sink
from sinklab.report import claims as report
from sinklab.sweep import results

ROOT = Path(__file__).parents[1]
RESULTS_DIR = ROOT / 'docs' / 'results'
RESULT_FILES = {'quickstart': 'claims.json', 'small': 'claims_small.json'}
CLAIM_TABLES = {'claims': claim_definitions.CLAIMS, 'hypotheses': hypotheses.CLAIMS}
DISCUSSION_HEADING = '## Claims that are contradicted, not seen or unsettled\n'
# Statements of configs/open_models.py that are about a claim: {claim: (experiment, statements)}.
OPEN_MODEL_STATEMENTS = {
    'emerges': ('inputs', ('Natural text has a sink.',)),
    'spikes': ('spikes', ('Natural text has massive activations.',)),
    'domains': (
        'domains',
        tuple(f'The domain hardly matters: {domain}.' for domain in ('code', 'logs', 'german', 'japanese')),
    ),
    'streaming': ('streaming', ('Streaming needs the first token.', 'Streaming needs no other first tokens.')),
}
COLOUR_OF_VERDICT = {'holds': '#009E73', 'contradicted': '#D55E00', 'not seen': '#0072B2', 'unsettled': '#999999'}
README_CLAIMS = 'sigmoid_minus_log_t', 'column_k', 'rate_lower', 'column_v', 'batch_small'  # against softmax


def read_results(size: str) -> dict:
    return results.read_results(RESULTS_DIR / RESULT_FILES[size])


@functools.cache
def load_results(size: str) -> dict:
    """Return the content of claims.json of a size, with the runs of all rows that claims and pages read."""
    claims_data = read_results(size)
    claims = [claim for table in CLAIM_TABLES for claim in load_claims(table, size).values()]
    rows = {reading.row for claim in claims for reading in claim.readings}
    rows |= {f'model_size:{row}' for row in model_size.ROWS}
    return claims_data | dict(runs=claims_data['runs'] | claims_command.find_runs(rows, claims_data))


@functools.cache
def load_claims(table: str, size: str) -> dict[str, report.Claim]:
    return report.parse_claims(CLAIM_TABLES[table], size)


@functools.cache
def load_verdicts(table: str) -> dict[str, dict[str, dict]]:
    """Return {size: {claim: entry of its verdict}}."""
    return {
        size: {
            entry['claim']: entry
            for entry in claims_command.compute_verdicts(load_claims(table, size), read_results(size))
        }
        for size in RESULT_FILES
    }


@functools.cache
def find_discussions() -> dict[str, str]:
    """Return {claim: anchor of the first section below DISCUSSION_HEADING of claims.md that names it}."""
    _, _, page = (RESULTS_DIR / 'claims.md').read_text(encoding='utf-8').partition(DISCUSSION_HEADING)
    anchors: dict[str, str] = {}
    for section in page.partition('\n## ')[0].split('\n### ')[1:]:
        heading, _, text = section.partition('\n')
        for claim in re.findall(r'`([\w.]+)`', text):
            anchors.setdefault(claim, re.sub(r'\W+', '-', heading.lower()))
    return anchors


def list_values(claims_data: dict, row: str, metric: str) -> list[float]:
    """List the values of a metric at the end of all runs of a row, in the order of the seeds."""
    runs = claims_data['runs'].get(row, {})
    return [runs[seed]['end'][metric] for seed in sorted(runs, key=int) if metric in runs[seed]['end']]


def format_cell(entry: dict, unit: str, anchor: str | None = None) -> str:
    """Format the verdict at a size, with the mean difference, its interval and the number of seeds.

    Other verdicts than "holds" link to `anchor`.
    """
    if entry['verdict'] == 'not run':
        return ''
    values = list(entry['differences'].values())
    if not values:
        return f'[{entry["verdict"]}](#{anchor})' if anchor else entry['verdict']
    spread = report.format_mean_and_interval(entry) + unit
    verdict = report.format_verdict(entry)
    if anchor and entry['verdict'] not in ('holds', 'too few seeds'):
        verdict = f'[{verdict}](#{anchor})'
    return f'**{verdict}**<br>{spread}, n={len(values)}'


def format_sink_count(claim: report.Claim, claims_data: dict) -> str:
    """Format how many runs have a sink, for a claim that a sink emerges; return an empty string for another claim."""
    if not claim.right or claim.right.when == 'end' or not claim.left.metric.startswith('sink/'):
        return ''
    runs = claims_data['runs'].get(claim.left.row, {}).values()
    metric = claim.left.metric
    sinks = [has_sink(run['end'][metric], run['start'][metric]) for run in runs if metric in run['end']]
    return f'; with a sink: {sum(sinks)}' if sinks else ''


def get_unit_text(claim: report.Claim) -> str:
    """Return the unit of a difference, after a space; empty for percentage points and ratios."""
    unit = claim.left and report.UNIT_OF_METRIC.get(claim.left.metric)
    return f' {unit}' if unit else ''


def format_open_models() -> str:
    """Format how many of the statements that are about a claim hold for pretrained models."""
    lines = []
    for claim, (experiment, selected) in OPEN_MODEL_STATEMENTS.items():
        entries = open_model_results.load_results()['experiments'][experiment].values()
        statements = {entry['statement']: entry for entry in open_models.EXPERIMENTS[experiment]['statements']}
        judged = [
            open_model_results.judge_statement(statements[name], entry) for name in selected for entry in entries
        ]
        num_holding = sum(text.startswith('holds') for text in judged)
        lines.append(f'- `{claim}`: {" ".join(selected)} {num_holding} of {len(judged)} hold.\n')
    return ''.join(lines)


def format_claim_table(table: str, entries_by_size: Mapping[str, dict]) -> str:
    """Format one line for each claim that was tested at some size, contradicted claims first."""
    rows = []
    for name in sorted(
        next(iter(entries_by_size.values())),
        key=lambda name: min(report.VERDICTS.index(entries[name]['verdict']) for entries in entries_by_size.values()),
    ):
        claims = {size: load_claims(table, size)[name] for size in entries_by_size}
        entries = {size: entries_by_size[size][name] for size in entries_by_size}
        if name in hypotheses.NATURAL_ROWS:  # docs/results/emergence.md has them
            continue
        if not any(entry['differences'] or entry['diverged'] for entry in entries.values()):
            continue
        cells = [
            format_cell(entry, get_unit_text(claims[size]), find_discussions().get(name))
            + format_sink_count(claims[size], load_results(size))
            for size, entry in entries.items()
        ]
        published = next((entry['published'] for entry in entries.values() if entry['published'] is not None), None)
        source = escape_markdown(re.sub(r'^(on |as )?Gu et al\. ', '', claims['quickstart'].source))
        statement = f'`{name}`: {escape_markdown(claims["quickstart"].statement)} ({source})'
        rows.append([statement, report.format_signed(published), *cells])
    return format_table(['claim', 'paper', *(f'size `{size}`' for size in entries_by_size)], rows)


def format_summary(entries_by_size: Mapping[str, dict]) -> str:
    """Format the counts of verdicts, and the sign test of each size."""
    lines = []
    for size, entries in entries_by_size.items():
        parts = [format_counts(entries) + '.', format_one_sided(entries), format_few_seeds(entries)]
        parts.append(report.format_sign_test(list(entries.values())))
        lines.append(f'- **`{size}`**: {" ".join(filter(None, parts))}\n')
    return ''.join(lines)


def format_one_sided(entries: Mapping[str, dict]) -> str:
    """Format how many claims are not seen and could not have been contradicted."""
    not_seen = [entry for entry in entries.values() if entry['verdict'] == 'not seen']
    one_sided = [entry for entry in not_seen if not entry['can_have_either_sign']]
    if not one_sided:
        return ''
    return f'Of the {len(not_seen)} that are not seen, {len(one_sided)} could not have been contradicted.'


def format_few_seeds(entries: Mapping[str, dict]) -> str:
    """Format how many claims with too few seeds have a mean difference on the claimed side."""
    directed = [
        entry
        for entry in entries.values()
        if entry['verdict'] == 'too few seeds'
        and entry['can_have_either_sign']
        and entry['relation'] != '='
        and entry['mean']
    ]
    if not directed:
        return ''
    num_as_claimed = sum(report.orient(entry, entry['mean']) > 0 for entry in directed)
    return (
        f'Of {len(directed)} with too few seeds that could have come out either way, {num_as_claimed} have a mean '
        'difference on the claimed side.'
    )


def get_size_row(name: str, suffix: str) -> str:
    return f'model_size:{name}' if name == model_size.REFERENCE else f'model_size:{name}{suffix}'


def format_size_table(claims_data: dict) -> str:
    """Format the batch size, Sink_1, the step of emergence and the loss of each model size."""
    rows = []
    for suffix in ('_equal_tokens', ''):
        for name in model_size.SHAPES:
            row = get_size_row(name, suffix)
            sinks, steps, losses = (
                list_values(claims_data, row, metric) for metric in ('sink/1', 'emergence/step', 'valid/loss')
            )
            if not sinks:
                continue
            spec, _ = config_flags.load_spec(claims_command.get_config_path(row), [], 'small')
            fails = ' (fails to train)' if all(list_values(claims_data, row, report.FAILS_METRIC)) else ''
            rows.append(
                [
                    name.upper(),
                    spec.optimizer.batch_size,
                    ', '.join(f'{sink:.1f}' for sink in sinks),
                    f'{np.median(steps):.0f}' if steps else 'none',
                    f'{np.mean(losses):.2f}{fails}',
                ]
            )
    headings = ['parameters', 'batch size', 'Sink_1 of each seed (%)', 'median step of emergence', 'mean loss']
    return format_table(headings, rows)


def fit_size_slope(claims_data: dict, names: list[str]) -> tuple[float, float, float, int]:
    """Fit Sink_1 over log10 of the parameters with equal tokens, by least squares over all runs.

    Returns:
        The slope in percentage points for ten times the parameters, the 95 % limits by Student's t, and the number of
        runs.
    """
    points = [
        (np.log10(model_size.count_millions(model_size.SHAPES[name])), sink)
        for name in names
        for sink in list_values(claims_data, get_size_row(name, '_equal_tokens'), 'sink/1')
    ]
    fit = stats.linregress(*zip(*points, strict=True))
    half_width = fit.stderr * stats.t.ppf(0.975, len(points) - 2)
    return fit.slope, fit.slope - half_width, fit.slope + half_width, len(points)


def format_size_section(claims_data: dict) -> str:
    """Format the table of sizes, and the slopes over all sizes, without the smallest and without the two smallest."""
    names = [*model_size.SHAPES]
    slopes = []
    for smallest in range(3):
        slope, low, high, num_runs = fit_size_slope(claims_data, names[smallest:])
        sizes = f'{names[smallest].upper()} to {names[-1].upper()}'
        slopes.append(f'{slope:.0f} [{low:.0f}, {high:.0f}] from {sizes} ({num_runs} runs)')
    return (
        f'{format_size_table(claims_data).strip()}\n\nPoints of Sink_1 for ten times the parameters at the same '
        f'batch size, with 95 % intervals: {"; ".join(slopes)}.'
    )


def format_readme_table(entries: Mapping[str, dict], claims_data: dict) -> str:
    """Format Sink_1 of softmax and of a changed model, published and ours, with the difference and the verdict."""
    claims = load_claims('claims', 'quickstart')
    rows = []
    for name in README_CLAIMS:
        claim = claims[name]
        entry = entries[name]
        numbers = claims_command.collect_published_numbers({name: claim})
        published, ours = [], []
        for reading in (claim.right, claim.left):
            value = numbers[reading.row].get(reading.metric)
            sinks = list_values(claims_data, reading.row, reading.metric)
            published.append('' if value is None else f'{value:.1f}')
            ours.append(f'{np.mean(sinks):.1f} ± {np.std(sinks, ddof=1):.1f}')
        difference = report.format_mean_and_interval(entry, 1)
        verdict = report.format_verdict(entry).partition(' (')[0]
        rows.append([escape_markdown(claim.statement), *published, *ours, difference, verdict])
    headings = ['claim', 'paper: softmax', 'changed', 'ours: softmax', 'changed', 'difference', 'verdict']
    return format_table(headings, rows)


def format_counts(entries: Mapping[str, dict]) -> str:
    return report.format_counts(list(entries.values())).rstrip('.')


def format_part(part: str) -> str:
    """Format a generated part of a page."""
    verdicts = load_verdicts('hypotheses' if part == 'hypotheses' else 'claims')
    return {
        'summary': lambda: format_summary(verdicts),
        'table': lambda: format_claim_table('claims', verdicts),
        'hypotheses': lambda: format_claim_table('hypotheses', verdicts),
        'open models': format_open_models,
        'sizes': lambda: format_size_section(load_results('small')),
        'readme': lambda: format_readme_table(verdicts['quickstart'], load_results('quickstart')),
        'counts': lambda: format_counts(verdicts['quickstart']),
    }[part]().strip()


PAGES = {
    RESULTS_DIR / 'claims.md': ('summary', 'table', 'open models', 'hypotheses', 'sizes'),
    ROOT / 'README.md': ('readme', 'counts'),
    ROOT / 'docs' / 'index.md': ('counts',),
}


def update_page(text: str, parts: tuple[str, ...]) -> str:
    """Return a page with its generated parts replaced."""
    for part in parts:
        text = replace_part(text, f'claims: {part}', format_part(part))
    return text


def draw_intervals(path: Path) -> None:
    """Draw the interval of the difference of each claim about a sink score at the size quickstart."""
    import matplotlib.pyplot as plt

    entries = load_verdicts('claims')['quickstart'].values()  # contradicted claims come first
    drawn = [entry for entry in entries if entry['unit'] == '%' and entry['verdict'] in COLOUR_OF_VERDICT]
    figure, axes = plt.subplots(figsize=(6.4, 1 + 0.19 * len(drawn)), layout='constrained')
    for y, entry in enumerate(drawn):
        axes.plot(entry['interval'], [y, y], color=COLOUR_OF_VERDICT[entry['verdict']], linewidth=2)
        axes.plot(entry['mean'], y, 'o', color=COLOUR_OF_VERDICT[entry['verdict']], markersize=4)
        if entry['published'] is not None:
            axes.plot(entry['published'], y, 'k|', markersize=8)
    axes.axvline(0, color='black', linewidth=0.5)
    axes.set(xlabel='mean difference over seeds and its interval (%)', ylim=(len(drawn) - 0.4, -0.6))
    axes.set_yticks(range(len(drawn)), [f'{entry["claim"]} {entry["relation"]}' for entry in drawn], fontsize=7)
    handles = [plt.Line2D([], [], color=colour, label=verdict) for verdict, colour in COLOUR_OF_VERDICT.items()]
    handles.append(plt.Line2D([], [], color='black', marker='|', linewidth=0, label='published'))
    figure.legend(handles=handles, fontsize=7, loc='outside upper center', ncols=len(handles), frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    draw_intervals(RESULTS_DIR / 'claims.png')
    for path, parts in PAGES.items():
        path.write_text(update_page(path.read_text(encoding='utf-8'), parts), encoding='utf-8')


if __name__ == '__main__':
    main()
