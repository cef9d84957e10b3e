"""Generator of docs/paper/tables.md: tables and figures of the paper and later work, with our results.

Published numbers come from the files of configs/. Our numbers come from
docs/results/claims.json, and `sinklab claims` computes the verdicts from them. This module defines which rows belong
to which table, and what a missing result would need.
"""

import contextlib
import dataclasses
import fnmatch
import functools
import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docs.reference import (
    escape_markdown_text,
    format_anchor,
    format_code,
    format_published,
    format_sentence,
    format_table,
    format_value,
    make_file_slug,
)
from sinklab.cli import claims as claims_command
from sinklab.cli import config_flags
from sinklab.config.differences import flatten_dict
from sinklab.config.spec import Spec
from sinklab.configs.open_models import PUBLISHED_SINK_RATES
from sinklab.configs.scale import CHIP_HOURS
from sinklab.errors import UserError
from sinklab.metrics.registry import find_metric_info
from sinklab.model import flops
from sinklab.report import claims as claims_report
from sinklab.report.sweep_table import summarize_values
from sinklab.sweep import results

RESULTS_FILE = Path(__file__).parent / 'results' / 'claims.json'
BASELINE_ROW = 'optimization:rate_4e-4_20k'
SWEEP_COMMAND = (
    'sinklab sweep --config=configs/{table}.py --size=quickstart \\\n  --workdir=runs/{table} \\\n  --rows={rows}'
)


@dataclasses.dataclass(frozen=True)
class PaperEntry:
    """A table or a figure, or several of them that show the same runs."""

    location: str
    title: str
    rows: tuple[str, ...] = ()  # TABLE:ROW, with wildcards
    description: str = ''
    commands: tuple[str, ...] = ()  # in addition to the training of the rows
    missing_reason: str = ''  # why there is no result, and what it would need
    claims: tuple[str, ...] = ()  # names in configs/claims.py of claims without a row


NO_OPEN_MODELS = (
    'The published models were not run: their weights are on the Hugging Face hub, which was out of reach when these '
    'results were made. '
)
SMALL_MODELS = NO_OPEN_MODELS + 'Two smaller ones were: see [Open models](../results/open_models.md). '
OPEN_MODEL_NEEDS = (
    SMALL_MODELS + 'It takes the model, its size in float32 as memory, and minutes on a CPU for models up to 1B.'
)

ENTRY_GROUPS: dict[str, tuple[PaperEntry, ...]] = {
    'Open models': (
        PaperEntry(
            'Figure 1 (v1)',
            'Sink_1 by model size: Pythia, GPT-2, OPT, LLaMA',
            ('model_size:*',),
            'A figure only. The rows are models with 0.05 to 2.9 million parameters, at `--size=small`.',
            commands=('sinklab measure hf:EleutherAI/pythia-14m', 'sinklab measure hf:openai-community/gpt2'),
            missing_reason=OPEN_MODEL_NEEDS,
            claims=('size',),
        ),
        PaperEntry(
            'Table 5 (v1), Table 1 (ICLR)',
            'Sink_1 of open models on natural, random and repeated tokens, base and chat',
            commands=('sinklab measure hf:meta-llama/Llama-2-7b-hf --inputs=natural,random,repeated',),
            missing_reason=SMALL_MODELS + 'It takes 28 GB of memory for a model of 7B in float32.',
            claims=('instruct',),
        ),
        PaperEntry(
            'Table 7 (ICLR)',
            'GPT2-XL with positions replaced or swapped',
            description='Published for t = 5, 10, 15, 20, 25: with token t at position 1, Sink_1 is 0.20 to 10.97; '
            'swapped, Sink_1 is 1.44 to 9.42 and Sink_t 57.63 to 51.13; without a change Sink_1 is 62.28.',
            commands=('sinklab measure hf:openai-community/gpt2-xl --inputs=repeated --positions=swap:5',),
            missing_reason=NO_OPEN_MODELS + 'It takes a model with learned positions; GPT2-XL needs 6 GB of memory.',
        ),
        PaperEntry(
            'Figure 7 (v1)',
            'Sink_1 in 17 domains of the Pile',
            description='Published as a figure only: the domain hardly matters.',
            commands=(
                "sinklab measure hf:EleutherAI/pythia-14m --inputs=domains --source='text:pile/*#domain=DOMAIN'",
            ),
            missing_reason=SMALL_MODELS + 'It also takes a sample of the Pile with its domains.',
            claims=('domains',),
        ),
        PaperEntry(
            'Section 3.1 and appendix C.1 (v1)',
            'Massive activations, norms of keys and values, angles of queries and keys, attention patterns',
            description='Published as figures. Every probe records the same numbers of a run (`norm/...`, `qk/...`), '
            'and the report draws them.',
            commands=('sinklab report runs/quickstart', 'sinklab measure hf:openai-community/gpt2 --json'),
            missing_reason=OPEN_MODEL_NEEDS,
            claims=('spikes', 'first_norm'),
        ),
        PaperEntry(
            'Figure 10 (ICLR), appendix C.3',
            'HellaSwag accuracy beside Sink_1; hybrid models',
            description='Published as a figure: both grow with size within a family, with no relation across '
            'families.',
            commands=('sinklab evaluate hf:EleutherAI/pythia-14m --tasks=hellaswag',),
            missing_reason=NO_OPEN_MODELS + 'It also takes the task data, from the same hub.',
        ),
        PaperEntry(
            'Propositions 1 to 4',
            'Attention on one repeated token follows from the position encoding alone',
            description='Checked by tests on random weights of every position encoding, and by the command on any '
            'model.',
            commands=('sinklab measure runs/quickstart/softmax-0 --inputs=repeated',),
        ),
    ),
    'Optimization': (
        PaperEntry(
            'Figure 2A (v1)',
            'The sink emerges during training',
            (BASELINE_ROW, 'natural:*', 'emergence:*'),
            'Published: Sink_1 rises between 1,000 and 2,000 steps. The rows of `natural.py` fit on one GPU: see '
            '[One GPU](../results/gpu.md). Those of `emergence.py` show how the step moves with weight decay, '
            'rate and width: see [Emergence](../results/emergence.md).',
        ),
        PaperEntry(
            'Table 9 (ICLR), Figure 2B (v1)',
            'Learning rate and number of steps',
            ('optimization:rate_*',),
        ),
        PaperEntry('Table 6 (v1)', 'Batch size', (BASELINE_ROW, 'optimization:batch_*')),
        PaperEntry('Section 4 (v1)', 'Schedule of the learning rate', ('optimization:cosine',)),
    ),
    'Data': (
        PaperEntry('Figure 2C (v1), Figure 28 (ICLR)', 'Amount of unique training data', ('data:amount_*',)),
        PaperEntry('Section 5 (v1)', 'Random tokens at the first positions', ('data:random_*',)),
        PaperEntry('Table 7 (v1)', 'A token that is the same in every sequence', ('data:fixed_*',)),
    ),
    'Loss': (
        PaperEntry('Table 1 (v1)', 'Weight decay', (BASELINE_ROW, 'optimization:decay_*')),
        PaperEntry('Figure 3B (v1)', 'Prefix language modeling', ('objective:prefix_*',)),
        PaperEntry(
            'Figure 2D (v1)',
            'Window attention',
            ('objective:full', 'objective:window_*', 'objective:block_*'),
            claims=('window', 'window_small'),
        ),
    ),
    'Architecture': (
        PaperEntry('Table 2 (v1)', 'Position encoding', ('positions:*',), claims=('position_relative_paper_code',)),
        PaperEntry(
            'Table 8 (v1)',
            'Feed-forward network',
            ('blocks:swiglu', *(f'blocks:{name}*' for name in ('relu', 'gelu', 'swish', 'reglu', 'geglu'))),
        ),
        PaperEntry(
            'Table 9 (v1)', 'Number and combination of heads', ('blocks:swiglu', 'blocks:heads_*', 'blocks:add*')
        ),
        PaperEntry('Appendix D.3 (v1)', 'Post-norm', ('blocks:post_norm',)),
    ),
    'Attention biases': (
        PaperEntry(
            'Table 3 (v1)',
            'Sink token, KV, K and V biases',
            ('columns:none', 'columns:sink_token', 'columns:kv', 'columns:k', 'columns:v'),
        ),
        PaperEntry('Table 10 (v1)', 'K bias with a fixed value', ('columns:k_first_*', 'columns:k_uniform_*')),
        PaperEntry(
            'Table 11 (v1), Table 12 (ICLR)',
            'Biases that heads share',
            ('columns:kv', 'columns:kv_shared', 'columns:k', 'columns:k_shared'),
        ),
        PaperEntry('Table 13 (ICLR)', 'K bias with few learned dimensions', ('columns:k_width_*',)),
    ),
    'Attention operation': (
        PaperEntry(
            'Tables 4 and 13 (v1)',
            'Similarities with and without normalization',
            (
                *(
                    f'attention:{row}'
                    for row in ('softmax', 'sigmoid', 'sigmoid_normalized', 'elu1', 'elu1_normalized')
                ),
                *(f'attention:{row}' for row in ('kernel_elu1*', 'linear*', 'mlp*')),
            ),
        ),
        PaperEntry('Table 12 (v1)', 'Softmax rows that sum to alpha', ('attention:softmax', 'attention:alpha_*')),
        PaperEntry(
            'Appendix D.4 (ICLR)', 'Normalization by a p-norm', ('attention:softmax_p_*', 'attention:sigmoid_p_*')
        ),
        PaperEntry(
            'Table 14 (v1)',
            'Sigmoid without normalization: learning rate and weight decay',
            ('attention:sigmoid', 'attention:sigmoid_decay_*', 'attention:sigmoid_rate_*'),
        ),
        PaperEntry(
            'Section 7.3 (v1)',
            'Softmax and sigmoid at 1B',
            ('scale:*',),
            'Sizes between 60M and 1B are of this project.',
            missing_reason='The larger sizes were not run. `configs/scale.py` has the estimates of the compiler: '
            + ', '.join(f'{hours} ({size})' for size, hours in CHIP_HOURS.items())
            + ' chip-hours of TPU v5e for each of the two.',
            claims=('1b',),
        ),
        PaperEntry(
            'Appendix E (ICLR)',
            'Supervised fine-tuning of the 1B pair',
            ('fine_tuning:*',),
            missing_reason='Not run: it begins with the 1B pair above, and takes UltraChat-200k.',
        ),
    ),
    'Talk: packing and BOS (Barbero et al., 2504.02732)': (
        PaperEntry('Slides; 2504.02732', 'Masks over documents and BOS tokens', ('packing:*',)),
        PaperEntry(
            '2504.02732, context length',
            'Context length at a constant number of tokens',
            ('extensions:context_*', 'context_length:*'),
            'The rows of `context_length.py` have the length of the size, a half and a quarter of it.',
            missing_reason='The rows of `extensions.py` were not run: windows of 2048 tokens are too long for the '
            'quickstart size.',
            claims=('context',),
        ),
    ),
    'StreamingLLM (Xiao et al., 2309.17453)': (
        PaperEntry(
            'Section 3.3, Table 3; section 4.2',
            'Models pre-trained with a sink token or a zero sink, under small caches',
            ('extensions:streaming_*',),
            'Perplexities X+Y are of a cache of the X first and the Y last keys. `sinklab stream` measures them of '
            'any trained model; [its speed](../results/streaming.md) was measured, the published models were not '
            'trained.',
            ('sinklab stream runs/streaming_vanilla --source=text:pg19/book.txt --cache=0+1024,4+1020',),
            missing_reason='Not run: three runs of 160M parameters and 75B tokens, and the first test book of PG19.',
            claims=('streaming',),
        ),
    ),
    'This project': (
        PaperEntry(
            'Hypotheses',
            'What may explain claims that small models contradict or leave open',
            ('hypotheses:*',),
            'See [Claims](../results/claims.md).',
        ),
    ),
    'Later work': (
        PaperEntry(
            '2409.04431, 2410.17174, 2504.20966',
            'Sigmoid with an offset, softmax-off-by-one, softpick',
            ('attention:sigmoid_apple', 'attention:softmax_off_by_one', 'attention:softpick'),
        ),
        PaperEntry(
            '2410.13835',
            'Bigram-Backcopy and ReLU attention (Guo et al.)',
            ('bigram_backcopy:*', 'attention:relu'),
            'Published in words and figures only. A row takes about a minute on two cores; its notes have results of '
            'this project.',
        ),
        PaperEntry('gpt-oss', 'A learned logit in the sum of softmax', ('columns:logit',)),
        PaperEntry(
            '2505.06708, 2510.09017',
            'Gated attention (Qiu et al.; value-state gates)',
            ('blocks:gate_*',),
        ),
        PaperEntry(
            '2603.05498, 2605.06611',
            'Sandwich norm, QK norm, head norm',
            ('blocks:sandwich_norm', 'blocks:qk_norm', 'blocks:head_norm'),
        ),
        PaperEntry(
            '2410.17174, 2506.19697',
            'Optimizers: SGD and Muon',
            ('optimization:sgd', 'optimization:muon'),
            claims=('muon',),
        ),
        PaperEntry('2603.17771', 'Gradient sinks (Chen et al.)', ('extensions:gradient_sinks',)),
    ),
}


def build_page() -> str:
    """Return the Markdown of the page."""
    entries = [entry for group in ENTRY_GROUPS.values() for entry in group]
    markdown = (
        '# Tables and figures of the paper\n\n'
        'Every table and figure of "When Attention Sink Emerges in Language Models" (Gu et al.), and of later work, '
        'that sinklab can run.\n\n' + format_introduction(entries)
    )
    for group, group_entries in ENTRY_GROUPS.items():
        markdown += f'## {group}\n\n' + ''.join(map(format_section, group_entries))
    return markdown + '\n<!-- Generated by docs/paper_tables.py; edits belong there. -->\n'


def format_introduction(entries: list[PaperEntry]) -> str:
    """Return what was run, and how to read the columns."""
    claims_data = load_results()
    verdict_counts = Counter(verdict_entry['verdict'] for verdict_entry in load_verdicts().values())
    rows = {row for entry in entries for row in match_rows(entry)}
    num_run = sum(find_our_runs(row) is not None for row in rows)
    seeds = sorted({len(seeds) for seeds in claims_data['runs'].values()})
    verdicts = ', '.join(
        f'{verdict_counts[verdict]} {verdict}' for verdict in claims_report.VERDICTS if verdict_counts[verdict]
    )
    size = claims_data['size']
    return (
        f'- **What was run.** {num_run} of {len(rows)} rows at size `{size}` (200,000 parameters), with {seeds[0]} '
        f'to {seeds[-1]} seeds, and none at the size of the paper. Verdicts on {sum(verdict_counts.values())} '
        f'[claims](../results/claims.md): {verdicts}.\n'
        '- **Published** numbers are of 60M parameters unless the title says otherwise. **Ours** are the mean and '
        'the standard deviation of all seeds; only directions can be compared. A value that scales with the size '
        'stands below. A dash: not run.\n'
        '- **Cost** is the operations of a run at the size of the paper, as a multiple of the baseline, which takes '
        f'at least {CHIP_HOURS["60M"]} chip-hours of TPU v5e by the estimate of the compiler (not measured). '
        f'At size `{size}`, two runs at once take about two minutes on two cores.\n'
        '- (v1) is arXiv 2410.10781v1, (ICLR) the printed version; they number tables differently. '
        '[Decisions](decisions.md) says how unclear passages were read.\n\n'
    )


def make_slug(entry: PaperEntry) -> str:
    slug_text = ''.join(character if character.isalnum() else '-' for character in entry.location.lower())
    return '-'.join(filter(None, slug_text.split('-')))


def format_section(entry: PaperEntry) -> str:
    """Return one table or figure of the paper."""
    heading = escape_markdown_text(f'{entry.location}: {entry.title}')
    markdown = f'### {heading} {{ #{make_slug(entry)} }}\n\n'
    markdown += f'{entry.description}\n\n' if entry.description else ''
    if commands := [*list_sweep_commands(entry), *entry.commands]:
        markdown += '```console\n' + '\n'.join(commands) + '\n```\n\n'
    if rows := match_rows(entry):
        markdown += format_table(
            ['row', 'published', f'ours ({load_results()["size"]})', 'cost'], map(format_row, rows)
        )
    if entry.location.startswith('Table 5'):
        markdown += format_open_models()
    markdown += f'{entry.missing_reason}\n\n' if entry.missing_reason else ''
    return markdown + format_claims(entry)


def list_sweep_commands(entry: PaperEntry) -> Iterator[str]:
    """Return one command for the rows of each file."""
    for name, rows in itertools.groupby(match_rows(entry), key=lambda row: row.partition(':')[0]):
        yield SWEEP_COMMAND.format(table=name, rows=','.join(row.partition(':')[2] for row in rows))


def format_row(row: str) -> list[str]:
    """Return the cells of a row."""
    file, _, name = row.partition(':')
    row_info = load_all_rows()[row]
    notes = escape_markdown_text(format_sentence(row_info['note'])) if row_info.get('note') else ''
    link = f'[{format_code(row)}](../reference/rows.md#{make_file_slug(file)}-{name})'
    return [
        link,
        format_published(row_info['published']) or notes or 'nothing',
        format_our_numbers(row),
        f'× {compute_relative_cost(row):.2g}',
    ]


def format_our_numbers(row: str) -> str:
    """Return our numbers of a row, with what the row sets at that size where that is another value."""
    runs = find_our_runs(row)
    if runs is None:
        return '-'
    names = [
        'sink/1',
        *(name for name in ('sink/2', 'sink/star') if name in load_all_rows()[row]['published']),
        'valid/loss',
    ]
    parts = []
    for name in names:
        if values := [item['end'][name] for item in runs.values() if name in item['end']]:
            parts.append(f'{format_code(name)} {format_spread(values, name)}')
    failed_runs = [item for item in runs.values() if item['end'].get('fails')]
    parts += (
        [f'fails in {len(failed_runs)} of {len(runs)}']
        if failed_runs or load_all_rows()[row]['published'].get('fails')
        else []
    )
    scaled_values = list_scaled_values(row)
    return '<br>'.join([*parts, f'{len(runs)} seeds', *(f'with {item}' for item in scaled_values)])


def format_spread(values: list[float], name: str) -> str:
    mean_and_sd, info = summarize_values(values), find_metric_info(name)
    digits = 1 if info and info.unit == '%' else 3
    return f'{mean_and_sd["mean"]:.{digits}f}' + (
        '' if mean_and_sd['sd'] is None else f' ± {mean_and_sd["sd"]:.{digits}f}'
    )


def list_scaled_values(row: str) -> list[str]:
    """Return the values that a row has at the size of our results, where they are not those of the paper."""
    config_values = flatten_dict(dataclasses.asdict(load_spec(row, load_results()['size'])))
    return [
        f'`{path}={format_value(config_values[path])}`'
        for path, value in load_all_rows()[row]['diff'].items()
        if config_values.get(path) != value
    ]


def compute_relative_cost(row: str) -> float:
    """Return the operations of a run at the size of the paper, as a multiple of the baseline."""
    return count_operations(load_spec(row, None)) / count_operations(load_spec(BASELINE_ROW, None))


def count_operations(spec: Spec) -> float:
    return flops.count_step_flops(spec) * spec.optimizer.steps


def format_open_models() -> str:
    inputs = list(
        dict.fromkeys(name for published_sinks in PUBLISHED_SINK_RATES.values() for name in published_sinks)
    )
    lines = (
        [
            format_code(model),
            *(f'{published_sinks[input_name]:.2f}' if input_name in published_sinks else '' for input_name in inputs),
        ]
        for model, published_sinks in PUBLISHED_SINK_RATES.items()
    )
    return 'Published Sink_1 in percent, at T = 64:\n\n' + format_table(['model', *inputs], lines)


def format_claims(entry: PaperEntry) -> str:
    """Return the verdicts on claims that are about the rows of an entry, or that it names."""
    rows, all_claims = set(match_rows(entry)), load_claims()
    names = [
        name for name, claim in all_claims.items() if name in entry.claims or (claim.left and claim.left.row in rows)
    ]
    if not names:
        return ''
    lines = ''.join(f'- {format_claim(load_verdicts()[name])}\n' for name in names)
    return f'Claims, and what our runs say:\n\n{lines}\n'


def format_claim(verdict_entry: dict) -> str:
    name, _, difference, seeds, verdict = claims_report.format_claim_cells(verdict_entry)
    unit = ' percentage points' if verdict_entry['unit'] == '%' else ''
    difference_text = f', difference {difference}{unit}, {seeds} seeds' if difference else ''
    reason = (
        f': it {escape_markdown_text(verdict_entry["untestable_reason"])}'
        if verdict_entry['untestable_reason']
        else ''
    )
    statement = escape_markdown_text(verdict_entry['statement'])
    verdict_text = f'**{escape_markdown_text(verdict)}**{escape_markdown_text(difference_text)}{reason}'
    return f'{format_code(name)} {format_anchor(f"claim-{name}")}{statement} {verdict_text}'


# Data of the repository


@functools.cache
def load_all_rows() -> dict[str, dict[str, Any]]:
    """Return {TABLE:ROW: what the row is about} of all files of configs/."""
    return {
        f'{make_file_slug(file)}:{name}': row
        for file in config_flags.list_config_files()
        for name, row in config_flags.load_rows(file).items()
    }


@functools.cache
def match_rows(entry: PaperEntry) -> tuple[str, ...]:
    """Return the rows of an entry, in the order of its patterns."""
    matched_rows = [row for pattern in entry.rows for row in fnmatch.filter(load_all_rows(), pattern)]
    return tuple(dict.fromkeys(matched_rows))


@functools.cache
def load_results() -> dict[str, Any]:
    return results.read_results(RESULTS_FILE)


@functools.cache
def load_claims() -> dict[str, Any]:
    claim_table = config_flags.load_config_module('configs/claims.py', 'CLAIMS').CLAIMS
    return claims_report.parse_claims(claim_table, load_results()['size'])


@functools.cache
def load_verdicts() -> dict[str, dict]:
    return {
        verdict_entry['claim']: verdict_entry
        for verdict_entry in claims_command.compute_verdicts(load_claims(), load_results())
    }


@functools.cache
def load_spec(row: str, size: str | None) -> Spec:
    table, _, name = row.partition(':')
    return config_flags.load_spec(f'configs/{table}.py:{name}', [], size)[0]


@functools.cache
def find_measured_rows() -> dict[str, str]:
    """Return {row: a measured row with the same config at the size of our results}."""
    specs = {}
    for row in load_all_rows():
        with contextlib.suppress(UserError):  # the row is invalid at this size
            specs[row] = load_spec(row, load_results()['size'])
    return results.find_equal_rows(load_results(), specs)


def find_our_runs(row: str) -> dict[str, dict] | None:
    """Return our runs by seed: those of a measured row with the same config; None where there are none."""
    measured_row = find_measured_rows().get(row)
    return measured_row and load_results()['runs'][measured_row]


if __name__ == '__main__':
    print(build_page())
