"""Tables of docs/results/claims.md, and verdicts in the README and other pages, from docs/results/claims*.json.

    python -m docs.claims_results

The parts of the pages between markers are generated from claims.json (size quickstart), claims_small.json (size
small) and, for pretrained models, from open_models.json.
"""

import functools
import re
from collections.abc import Collection, Mapping
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
from sinklab.metrics.emergence import MIN_FINAL_RATE_PERCENT
from sinklab.report import claims as report
from sinklab.report import statistics
from sinklab.sweep import results

ROOT = Path(__file__).parents[1]
RESULTS_DIR = ROOT / 'docs' / 'results'
RESULT_FILES = {'quickstart': 'claims.json', 'small': 'claims_small.json'}
CLAIM_TABLES = {'claims': claim_definitions.CLAIMS, 'hypotheses': hypotheses.CLAIMS}
DISCUSSION_HEADING = '## Claims that are contradicted, not seen or unsettled\n'
BASELINE = 'attention:softmax'
PARAMETERS = {'quickstart': '0.2M', 'small': '1.3M'}  # without embeddings
# Statements of configs/open_models.py that are about a claim: {claim: (experiment, statements)}.
OPEN_MODEL_STATEMENTS = {
    'emerges': ('inputs', ('Natural text has a sink.',)),
    'spikes': ('spikes', ('A text has massive activations.',)),
    'domains': (
        'domains',
        tuple(f'The domain hardly matters: {domain}.' for domain in ('code', 'logs', 'german', 'japanese')),
    ),
    'streaming': ('streaming', ('Without the first token it breaks.', 'One first token is enough.')),
}
# Rows that a section of claims.md compares, at the size quickstart: {section: {label: row}}.
SECTION_ROWS = {
    'weight decay': {
        '0.1': 'hypotheses:decay_0.1',
        '0.5 (baseline)': 'hypotheses:decay_0.5',
        '1': 'hypotheses:decay_1.0',
        '2': 'hypotheses:decay_2.0',
    },
    'batch size': {
        '1/4': 'optimization:batch_128',
        '1/2': 'optimization:batch_256',
        '1 (baseline)': 'attention:softmax',
        '2': 'optimization:batch_1024',
        '1/4, four times the steps': 'hypotheses:batch_tokens',
        '1/4, four times the steps, half the learning rate': 'hypotheses:batch_tokens_half_rate',
    },
    'learning rate': {
        '1/4': 'optimization:rate_1e-4_20k',
        '1/2': 'optimization:rate_2e-4_20k',
        '1/2, twice the steps': 'optimization:rate_2e-4_40k',
        '1 (baseline)': 'attention:softmax',
        '2': 'optimization:rate_8e-4_20k',
        '2, half the steps': 'optimization:rate_8e-4_10k',
        '3': 'hypotheses:rate_3',
    },
    'data': {
        name: name
        for name in (
            'data:amount_5b',
            'data:amount_50m',
            'data:random_1',
            'data:random_1_2',
            'data:random_1_10',
            'packing:causal',
            'packing:document',
            'packing:document_bos',
            'packing:causal_fixed',
            'data:fixed_1',
        )
    },
    'positions': {
        'rotary (baseline)': 'attention:softmax',
        'none': 'positions:none',
        'absolute': 'positions:absolute',
        'learned': 'positions:learned',
        'ALiBi': 'positions:alibi',
        "relative, as in the paper's code": 'positions:relative_paper_code',
    },
    'blocks': {
        name: f'blocks:{name}'
        for name in (
            'swiglu',
            'post_norm',
            'sandwich_norm',
            'qk_norm',
            'head_norm',
            'gate_elementwise',
            'gate_headwise',
            'gate_value_state',
            'gate_shared',
            'heads_2',
            'heads_1',
        )
    },
    'learned KV': {name: f'columns:{name}' for name in ('sink_token', 'kv', 'k', 'v', 'k_first_1', 'k_first_20')},
    'operations': {
        name: f'attention:{name}'
        for name in (
            'softmax',
            'softmax_p_2',
            'softmax_p_3',
            'softmax_p_4',
            'elu1_normalized',
            'kernel_elu1',
            'kernel_elu1_normalized',
            'linear_normalized',
            'alpha_2',
        )
    },
}
README_CLAIMS = (
    'emerges',
    'sigmoid',
    'sigmoid_apple',
    'sigmoid_normalized',
    'elu1',
    'column_k',
    'column_v',
    'rate_lower',
    'decay_more',
    'batch_small',
)


@functools.cache
def load_results(size: str) -> dict:
    return results.read_results(RESULTS_DIR / RESULT_FILES[size])


@functools.cache
def load_claims(table: str, size: str) -> dict[str, report.Claim]:
    return report.parse_claims(CLAIM_TABLES[table], size)


@functools.cache
def load_verdicts(table: str) -> dict[str, dict[str, dict]]:
    """Return {size: {claim: entry of its verdict}}."""
    return {
        size: {
            entry['claim']: entry
            for entry in claims_command.compute_verdicts(load_claims(table, size), load_results(size))
        }
        for size in RESULT_FILES
    }


@functools.cache
def find_discussions() -> dict[str, str]:
    """Return {claim: anchor of the first section of claims.md whose text names it}.

    The sections are those below "Claims that are contradicted, not seen or unsettled".
    """
    _, _, page = (RESULTS_DIR / 'claims.md').read_text(encoding='utf-8').partition(DISCUSSION_HEADING)
    anchors: dict[str, str] = {}
    for section in page.partition('\n## ')[0].split('\n### ')[1:]:
        heading, _, text = section.partition('\n')
        for claim in re.findall(r'`([\w.]+)`', text):
            anchors.setdefault(claim, re.sub(r'\W+', '-', heading.lower()))
    return anchors


def format_cell(entry: dict, unit: str, anchor: str | None = None) -> str:
    """Format the verdict at a size, with the mean difference, its interval and the number of seeds.

    With too few seeds for an interval, the cell has the range of the differences instead. Other verdicts than
    "holds" link to `anchor`.
    """
    if entry['verdict'] == 'not run':
        return ''
    values = list(entry['differences'].values())
    if not values:
        return f'[{entry["verdict"]}](#{anchor})' if anchor else entry['verdict']
    spread = report.format_mean_and_interval(entry) + unit
    if entry['verdict'] == 'too few seeds' and len(values) > 1:
        spread += f' ({min(values):+.2f} to {max(values):+.2f})'
    failing_text = ''.join(f'<br>all runs of {row} fail to train' for row in entry['failing_rows'])
    verdict = report.format_verdict(entry)
    if anchor and entry['verdict'] not in ('holds', 'too few seeds'):
        verdict = f'[{verdict}](#{anchor})'
    return f'**{verdict}**<br>{spread}, n = {len(values)}{failing_text}'


def format_sink_count(claim: report.Claim, claims_data: dict) -> str:
    """Format how many runs have a sink, for a claim that a sink emerges; return an empty string for another claim."""
    if not claim.right or claim.right.when == 'end' or not claim.left.metric.startswith('sink/'):
        return ''
    sinks = list_values(claims_data, claim.left.row, claim.left.metric)
    num_sinks = sum(sink >= MIN_FINAL_RATE_PERCENT for sink in sinks)
    return f'; {num_sinks} of {len(sinks)} runs have a sink' if sinks else ''


def get_unit_text(claim: report.Claim) -> str:
    """Return the unit of a difference, after a space; empty for percentage points and ratios."""
    return (
        f' {report.UNIT_OF_METRIC[claim.left.metric]}'
        if claim.left and claim.left.metric in report.UNIT_OF_METRIC
        else ''
    )


def format_open_models(claim: str) -> str:
    """Format the statements related to a claim, and how many of them hold for pretrained models."""
    if claim not in OPEN_MODEL_STATEMENTS:
        return ''
    experiment, selected = OPEN_MODEL_STATEMENTS[claim]
    statements = [item for item in open_models.EXPERIMENTS[experiment]['statements'] if item['statement'] in selected]
    entries = open_model_results.load_results()['experiments'][experiment]
    judged = [
        open_model_results.judge_statement(statement, entry) for statement in statements for entry in entries.values()
    ]
    num_holds = sum(text.startswith('holds') for text in judged)
    return f'{" ".join(selected)}<br>{num_holds} of {len(judged)} hold'


def format_claim_table(table: str, entries_by_size: Mapping[str, dict], with_open_models: bool) -> str:
    """Format one line for each claim with a verdict other than `not run` at some size, contradicted claims first."""
    rows = []
    names = next(iter(entries_by_size.values()))
    for name in sorted(
        names,
        key=lambda name: min(report.VERDICTS.index(entries[name]['verdict']) for entries in entries_by_size.values()),
    ):
        claims = {size: load_claims(table, size)[name] for size in entries_by_size}
        entries = {size: entries_by_size[size][name] for size in entries_by_size}
        cells = [
            format_cell(entries[size], get_unit_text(claims[size]), find_discussions().get(name))
            + format_sink_count(claims[size], load_results(size))
            for size in entries
        ]
        if not any(cells):
            continue
        claim = next((claim for claim in claims.values() if claim.left), claims['quickstart'])
        published = next((entry['published'] for entry in entries.values() if entry['published'] is not None), None)
        statement = f'`{name}`: {escape_markdown(claim.statement)} ({escape_markdown(claim.source)})'
        rows.append(
            [
                f'{statement}<br>{escape_markdown(claim.comparison or claim.untestable_reason)}',
                report.format_signed(published),
                *cells,
                *([format_open_models(name)] if with_open_models else []),
            ]
        )
    headings = ['claim', 'paper', *(f'size `{size}`' for size in entries_by_size)]
    return format_table([*headings, *(['pretrained models'] if with_open_models else [])], rows)


def format_summary(entries_by_size: Mapping[str, dict]) -> str:
    """Format the counts of verdicts, the sign test, its qualifications and the training time of each size."""
    lines = []
    for size, entries in entries_by_size.items():
        few = [entry for entry in entries.values() if entry['verdict'] == 'too few seeds']
        directed = [
            entry for entry in few if entry['can_have_either_sign'] and entry['relation'] != '=' and entry['mean']
        ]
        num_as_claimed = sum(report.orient(entry, entry['mean']) > 0 for entry in directed)
        few_text = (
            f'Of {len(directed)} claims with too few seeds that could have come out either way, {num_as_claimed} '
            'have a mean difference on the claimed side.'
            if few
            else ''
        )
        counts = report.format_counts(list(entries.values()))
        parts = [
            counts,
            format_distinct_holds(entries),
            format_one_sided(entries),
            few_text,
            report.format_sign_test(list(entries.values())),
            format_direction_counts(entries, load_claims('claims', size)),
            format_skewness_note(entries),
            format_training_time(load_results(size)),
        ]
        lines.append(f'- **`{size}`**: {" ".join(filter(None, parts))}\n')
    return ''.join(lines)


def format_one_sided(entries: Mapping[str, dict]) -> str:
    """Format how many claims are not seen and could not have been contradicted."""
    not_seen = [entry for entry in entries.values() if entry['verdict'] == 'not seen']
    one_sided = [entry for entry in not_seen if not entry['can_have_either_sign']]
    return (
        f'Of the {len(not_seen)} claims that are not seen, {len(one_sided)} could not have been contradicted: '
        'they say that a sink emerges where there was none, or that a row fails to train where the baseline never '
        'fails.'
        if one_sided
        else ''
    )


def format_direction_counts(entries: Mapping[str, dict], claims: Mapping[str, report.Claim]) -> str:
    """Format how many claims have their mean difference on the claimed side, by what they claim about the baseline.

    The claims are those of the sign test; of those with nearly the same differences the first one counts.
    """
    directed = report.drop_same_differences(report.select_directed(list(entries.values())))
    if len(directed) < report.MIN_SIGN_TEST_CLAIMS:
        return ''
    groups: dict[str, list[bool]] = {}
    for entry in directed:
        claim = claims[entry['claim']]
        if claim.right.row != BASELINE or not claim.right.metric.startswith('sink/'):
            group = 'other comparisons'
        else:
            group = f'{report.COMPARISON_WORDS[claim.relation].removesuffix(" than")} of a sink than `{BASELINE}`'
        groups.setdefault(group, []).append(report.orient(entry, entry['mean']) > 0)
    counts = [f'{group}: {sum(groups[group])} of {len(groups[group])}' for group in sorted(groups)]
    return f'By what they claim, {"; ".join(counts)}.' if len(groups) > 1 else ''


def format_distinct_holds(entries: Mapping[str, dict]) -> str:
    """Format how many claims that hold are left if those with nearly the same differences count once."""
    holding = [entry for entry in entries.values() if entry['verdict'] == 'holds']
    num_distinct = len(report.drop_same_differences(holding))
    return (
        f'Counting nearly equal differences once, {num_distinct} of the {len(holding)} claims that hold are left.'
        if num_distinct < len(holding)
        else ''
    )


def format_skewness_note(entries: Mapping[str, dict]) -> str:
    """Name the claims that have another verdict with Student's interval, without the correction for skewness."""
    changed_names: dict[str, list[str]] = {}
    for name, entry in entries.items():
        if (
            entry['verdict'] in report.DECIDED_VERDICTS
            and (verdict := decide_without_skewness(name, entry)) != entry['verdict']
        ):
            changed_names.setdefault(verdict, []).append(f'`{name}`')
    texts = [f'{verdict}: {", ".join(changed_names[verdict])}' for verdict in sorted(changed_names)]
    return (
        f"By Student's intervals, without the correction for skewness, these verdicts differ: {'; '.join(texts)}."
        if texts
        else ''
    )


def decide_without_skewness(name: str, entry: dict) -> str:
    """Return the verdict on a claim by Student's interval; claims about failures have an exact interval."""
    if claim_definitions.CLAIMS.get(name, {}).get('left', ('', ''))[1] == report.FAILS_METRIC:
        return entry['verdict']
    values = list(entry['differences'].values())
    mean, sd, _ = statistics.compute_moments(np.float64(values))
    interval = statistics.compute_hall_interval(mean, sd, 0.0, len(values), statistics.LOOK_CONFIDENCE_LEVEL)
    return statistics.decide_verdict(interval, mean, entry['relation'], entry['min_difference'])


def list_runs(claims_data: dict, row: str) -> list[dict]:
    """List the measurements of all runs of a row, in the order of the seeds."""
    runs = results.expand_same_rows(claims_data).get(row, {})
    return [runs[seed] for seed in sorted(runs, key=int)]


def list_end_metrics(claims_data: dict, row: str) -> list[dict[str, float]]:
    """List the metrics at the end of all runs of a row, in the order of the seeds."""
    return [run['end'] for run in list_runs(claims_data, row)]


def list_values(claims_data: dict, row: str, metric: str) -> list[float]:
    """List the values of a metric at the end of all runs of a row, in the order of the seeds."""
    return [metrics[metric] for metrics in list_end_metrics(claims_data, row) if metric in metrics]


def format_largest_norm_ratio(metrics: Mapping[str, float], num_layers: int) -> str:
    """Format the largest ratio of norms after a block, with `≥` if it was not recorded after each block."""
    ratios = [value for name, value in metrics.items() if name.startswith('norm/ratio/')]
    if not ratios:
        return '-'
    return f'{"" if len(ratios) == num_layers else "≥ "}{max(ratios):.1f}'


def format_training_time(claims_data: dict) -> str:
    """Format the sum and the median of the training times of all runs that recorded them."""
    runs = [measured for seeds in claims_data['runs'].values() for measured in seeds.values()]
    seconds = [measured['end']['seconds'] for measured in runs if 'seconds' in measured['end']]
    if not seconds:
        return ''
    hours = sum(seconds) / 3600
    return (
        f'{len(seconds)} of {len(runs)} runs recorded their training time: {hours:.1f} hours in total, median '
        f'{np.median(seconds) / 60:.1f} minutes. Several ran at once.'
    )


def get_size_row(name: str, suffix: str) -> str:
    return f'model_size:{name}' if name == model_size.REFERENCE else f'model_size:{name}{suffix}'


def format_size_table(claims_data: dict) -> str:
    """Format the batch size, Sink_1, the step of emergence, the norm ratio and the loss of each model size."""
    rows = []
    for suffix in ('_equal_tokens', ''):
        for name in model_size.SHAPES:
            row = get_size_row(name, suffix)
            finished = [metrics for metrics in list_end_metrics(claims_data, row) if 'sink/1' in metrics]
            if not finished:
                continue
            steps = list_values(claims_data, row, 'emergence/step')
            spec, _ = config_flags.load_spec(claims_command.get_config_path(row), [], 'small')
            rows.append(
                [
                    name.upper(),
                    str(spec.optimizer.batch_size),
                    ', '.join(f'{metrics["sink/1"]:.1f}' for metrics in finished),
                    format_emergence(steps, len(finished)),
                    ', '.join(format_largest_norm_ratio(metrics, spec.model.layers) for metrics in finished),
                    format_loss(finished),
                ]
            )
    headings = ['parameters', 'batch size', 'Sink_1 of each seed (%)', 'median step of emergence']
    headings += ['largest norm ratio of each seed', 'mean loss']
    return format_table(headings, rows)


def format_loss(runs: list[dict[str, float]]) -> str:
    """Format the mean loss, and whether all runs fail to train."""
    fails = all(metrics[report.FAILS_METRIC] for metrics in runs)
    return f'{np.mean([metrics["valid/loss"] for metrics in runs]):.2f}{" (fails to train)" if fails else ""}'


def format_emergence(steps: list[float], num_runs: int) -> str:
    """Format the median step at which a sink emerges, or how many of the runs have one if not all do."""
    if len(steps) == num_runs:
        return f'{np.median(steps):.0f}'
    return f'{len(steps)} of {num_runs} seeds' if steps else 'none'


def format_norm_correlation(claims_data: dict) -> str:
    """Format the rank correlation of Sink_1 with the norm ratio after block 5, over runs and over rows."""
    metric_pairs = {
        row: [
            (metrics['sink/1'], metrics['norm/ratio/05'])
            for metrics in list_end_metrics(claims_data, row)
            if 'sink/1' in metrics and 'norm/ratio/05' in metrics
        ]
        for row in claims_data['runs']
    }
    pairs = [pair for row_pairs in metric_pairs.values() for pair in row_pairs]
    mean_pairs = [np.mean(row_pairs, axis=0) for row_pairs in metric_pairs.values() if row_pairs]
    run_correlation, row_correlation = (
        stats.spearmanr(*np.transpose(values)).statistic for values in (pairs, mean_pairs)
    )
    return (
        f'In the {len(pairs)} runs of the size `small` that recorded both, the rank correlation (Spearman) of Sink_1 '
        f'with the norm ratio after block 5 is {run_correlation:.2f}; over the means of their {len(mean_pairs)} rows '
        f'it is {row_correlation:.2f}.'
    )


def fit_size_slope(claims_data: dict, names: Collection[str]) -> tuple[float, float, float, int]:
    """Fit Sink_1 over log10 of the parameters with equal tokens, by least squares over all runs.

    Args:
        claims_data: The content of claims.json.
        names: The sizes, keys of model_size.SHAPES.

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
        slope, low, high, runs = fit_size_slope(claims_data, names[smallest:])
        slopes.append(
            [f'{names[smallest].upper()} to {names[-1].upper()}', f'{slope:.0f} [{low:.0f}, {high:.0f}]', str(runs)]
        )
    heading = 'points of Sink_1 for ten times the parameters [95 %]'
    return (
        f'{format_size_table(claims_data).strip()}\n\nStraight lines over the logarithm of the parameters, fitted to '
        f'the runs with the same batch size:\n\n{format_table(["sizes", heading, "runs"], slopes).strip()}'
    )


def format_mean_and_range(values: list[float]) -> str:
    """Format percentages; return an empty string without values."""
    return f'{np.mean(values):.1f} ({min(values):.1f} to {max(values):.1f})' if values else ''


def format_loss_range(losses: list[float]) -> str:
    return f'{min(losses):.2f} to {max(losses):.2f}' if losses else 'diverged'


def get_emergence_step(run: dict) -> float | None:
    """Return the step at which the sink of a run emerges; None if it has none, or has one before training."""
    has_sink_at_start = run['start'].get('sink/1', 0.0) >= MIN_FINAL_RATE_PERCENT
    return None if has_sink_at_start else run['end'].get('emergence/step')


def format_section_table(claims_data: dict, heading: str, rows: Mapping[str, str]) -> str:
    """Format the sinks and losses of rows, {label: row}, over seeds, beside the published Sink_1."""
    with_star = any(list_values(claims_data, row, 'sink/star') for row in rows.values())
    lines = []
    for label, row in rows.items():
        runs = list_runs(claims_data, row)
        steps = [step for step in map(get_emergence_step, runs) if step is not None]
        published = config_flags.load_row_info(claims_command.get_config_path(row))['published'].get('sink/1')
        median_text = f' (step {np.median(steps):.0f})' if steps else ''
        lines.append(
            [
                label,
                str(len(runs)),
                '' if published is None else f'{published:.1f}',
                format_mean_and_range(list_values(claims_data, row, 'sink/1')),
                *([format_mean_and_range(list_values(claims_data, row, 'sink/star'))] if with_star else []),
                f'{len(steps)}{median_text}',
                format_loss_range(list_values(claims_data, row, 'valid/loss')),
            ]
        )
    headings = [heading, 'seeds', 'Sink_1 in the paper (%)', 'Sink_1 (%)', *(['Sink_* (%)'] if with_star else [])]
    return format_table([*headings, 'seeds in which Sink_1 emerges (median)', 'loss (nats)'], lines)


def format_seed_table(claims_data: dict) -> str:
    """Format Sink_1 and the step of emergence of each run, and the losses, one line for each row.

    `-`: the run diverged, no sink emerged, or there was one before training.
    """
    rows = []
    for row in sorted(claims_data['runs']):
        runs = list_runs(claims_data, row)
        steps = [get_emergence_step(run) for run in runs]
        rows.append(
            [
                row,
                ', '.join(sorted(claims_data['runs'][row], key=int)),
                ', '.join(f'{run["end"]["sink/1"]:.1f}' if 'sink/1' in run['end'] else '-' for run in runs),
                ', '.join('-' if step is None else f'{step:.0f}' for step in steps),
                format_loss_range(list_values(claims_data, row, 'valid/loss')),
            ]
        )
    return format_table(['row', 'seeds', 'Sink_1 (%)', 'step of emergence', 'loss (nats)'], rows)


def format_readme_verdict(entry: dict, row: str) -> str:
    verdict = report.format_verdict(entry).partition(' (')[0]
    return f'{verdict} (its runs fail to train)' if row in entry['failing_rows'] else verdict


def format_readme_table(entries_by_size: Mapping[str, dict], data_by_size: Mapping[str, dict]) -> str:
    """Format Sink_1 of the first reading of some claims as mean and standard deviation, and the verdicts."""
    rows = []
    for name in README_CLAIMS:
        claim = load_claims('claims', 'quickstart')[name]
        published = claims_command.collect_published_numbers({name: claim})[claim.left.row].get(claim.left.metric)
        cells = []
        for size, claims_data in data_by_size.items():
            sinks = list_values(claims_data, claim.left.row, claim.left.metric)
            spread = f' ± {np.std(sinks, ddof=1):.1f}' if len(sinks) > 1 else ''
            cells += [f'{np.mean(sinks):.1f}{spread}, n = {len(sinks)}' if sinks else '']
            cells += [format_readme_verdict(entries_by_size[size][name], claim.left.row) if sinks else '']
        number = '' if published is None else f'{published:.1f}'
        rows.append([f'`{name}`: {escape_markdown(claim.statement)}', number, *cells])
    headings = ['claim', 'paper, 60M']
    for size in data_by_size:
        headings += [f'ours, {PARAMETERS[size]}', 'verdict']
    return format_table(headings, rows)


def format_counts(entries: Mapping[str, dict]) -> str:
    return report.format_counts(list(entries.values())).rstrip('.')


def format_part(part: str) -> str:
    """Format a generated part of a page."""
    data_by_size = {size: load_results(size) for size in RESULT_FILES}
    verdicts = load_verdicts('hypotheses' if part == 'hypotheses' else 'claims')
    return {
        'summary': lambda: format_summary(verdicts),
        'table': lambda: format_claim_table('claims', verdicts, with_open_models=True),
        'hypotheses': lambda: format_claim_table('hypotheses', verdicts, with_open_models=False),
        'sizes': lambda: format_size_section(data_by_size['small']),
        'norms': lambda: format_norm_correlation(data_by_size['small']),
        **{
            f'rows {section}': functools.partial(format_section_table, data_by_size['quickstart'], section, rows)
            for section, rows in SECTION_ROWS.items()
        },
        **{
            f'seeds {size}': functools.partial(format_seed_table, claims_data)
            for size, claims_data in data_by_size.items()
        },
        'readme': lambda: format_readme_table(verdicts, data_by_size),
        'counts': lambda: format_counts(verdicts['quickstart']),
        'counts small': lambda: format_counts(verdicts['small']),
    }[part]().strip()


PAGES = {
    RESULTS_DIR / 'claims.md': (
        'summary',
        'table',
        'hypotheses',
        'sizes',
        'norms',
        *(f'rows {section}' for section in SECTION_ROWS),
        *(f'seeds {size}' for size in RESULT_FILES),
    ),
    ROOT / 'README.md': ('readme', 'counts', 'counts small'),
    ROOT / 'docs' / 'index.md': ('counts',),
    ROOT / 'docs' / 'faq.md': ('counts',),
}


def update_page(text: str, parts: tuple[str, ...]) -> str:
    """Return a page with its generated parts replaced."""
    for part in parts:
        text = replace_part(text, f'claims: {part}', format_part(part))
    return text


def main() -> None:
    for path, parts in PAGES.items():
        path.write_text(update_page(path.read_text(encoding='utf-8'), parts), encoding='utf-8')


if __name__ == '__main__':
    main()
