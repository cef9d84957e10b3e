"""Writes docs/paper/tables.md: every table and figure of the paper and of later work, as rows, with our results.

Published numbers are those of the rows in configs/ and of sinklab/observe/published.py, ours those of
docs/results/claims.json, verdicts those that `sinklab claims` computes of it. What is written here is which rows
belong to which table, and what a result would take.
"""

import dataclasses
import fnmatch
import functools
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from docs.reference import anchor, code, escape, file_slug, published, sentence, shown, table
from sinklab.cli import claims as claims_command
from sinklab.cli import config
from sinklab.folder import flat
from sinklab.measure.table import number
from sinklab.model import flops
from sinklab.observe.published import PUBLISHED
from sinklab.record import Refusal
from sinklab.report import claims as claims_report
from sinklab.report.sweep import spread
from sinklab.spec import Spec
from sinklab.sweep import results

RESULTS = Path(__file__).parent / 'results' / 'claims.json'
BASELINE = 'optimization:rate_4e-4_20k'
CHIP_HOURS = 61  # of the baseline on TPU v5e, by the compiler's estimate: configs/scale.py
TRAINED = (
    'sinklab sweep --config=configs/{table}.py --size=quickstart \\\n  --workdir=runs/{table} \\\n  --rows={rows}'
)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A table or a figure, or several that show the same runs."""

    where: str
    title: str
    rows: tuple[str, ...] = ()  # TABLE:ROW, with wildcards
    words: str = ''
    commands: tuple[str, ...] = ()  # besides training the rows
    takes: str = ''  # why there is no result, and what one would take
    claims: tuple[str, ...] = ()  # of configs/claims.py, which have no row


OPEN = 'Not run: the weights are on the Hugging Face hub, which was out of reach when these results were made. '
OPEN_NEEDS = OPEN + 'It takes the model, its size in float32 as memory, and minutes on a CPU for models up to 1B.'

GROUPS: dict[str, tuple[Entry, ...]] = {
    'Open models': (
        Entry(
            'Figure 1 (v1)',
            'Sink_1 by model size: Pythia, GPT-2, OPT, LLaMA',
            words='Published as a figure only.',
            commands=('sinklab measure hf:EleutherAI/pythia-14m', 'sinklab measure hf:openai-community/gpt2'),
            takes=OPEN_NEEDS,
            claims=('size',),
        ),
        Entry(
            'Table 5 (v1), Table 1 (ICLR)',
            'Sink_1 of open models on natural, random and repeated tokens, base and chat',
            commands=('sinklab measure hf:meta-llama/Llama-2-7b-hf --inputs=natural,random,repeated',),
            takes=OPEN + 'It takes 28 GB of memory for a model of 7B in float32.',
            claims=('instruct',),
        ),
        Entry(
            'Table 7 (ICLR)',
            'GPT2-XL with positions replaced or swapped',
            words='Published for t = 5, 10, 15, 20, 25: with token t at position 1, Sink_1 is 0.20 to 10.97; '
            'swapped, Sink_1 is 1.44 to 9.42 and Sink_t 57.63 to 51.13; without a change Sink_1 is 62.28.',
            commands=('sinklab measure hf:openai-community/gpt2-xl --inputs=repeated --positions=swap:5',),
            takes=OPEN_NEEDS,
        ),
        Entry(
            'Figure 7 (v1)',
            'Sink_1 in 17 domains of the Pile',
            words='Published as a figure only: the domain hardly matters.',
            commands=(
                "sinklab measure hf:EleutherAI/pythia-14m --inputs=domains --source='text:pile/*#domain=DOMAIN'",
            ),
            takes=OPEN + 'It also takes a sample of the Pile with its domains.',
            claims=('domains',),
        ),
        Entry(
            'Section 3.1 and appendix C.1 (v1)',
            'Massive activations, norms of keys and values, angles of queries and keys, attention patterns',
            words='Published as figures. Every probe records the same numbers of a run (`norm/...`, `qk/...`), and '
            'the report draws them.',
            commands=('sinklab report runs/quickstart', 'sinklab measure hf:openai-community/gpt2 --json'),
            takes=OPEN_NEEDS,
            claims=('spikes',),
        ),
        Entry(
            'Figure 10 (ICLR), appendix C.3',
            'HellaSwag accuracy beside Sink_1; hybrid models',
            words='Published as a figure: both grow with size within a family, with no relation across families.',
            commands=('sinklab evaluate hf:EleutherAI/pythia-14m --tasks=hellaswag',),
            takes=OPEN + 'It also takes the task data, from the same hub.',
        ),
        Entry(
            'Propositions 1 to 4',
            'Attention on one repeated token follows from the position encoding alone',
            words='Checked by tests on random weights of every position encoding, and by the command on any model.',
            commands=('sinklab measure runs/quickstart/softmax-0 --inputs=repeated',),
        ),
    ),
    'Optimization': (
        Entry(
            'Figure 2A (v1)',
            'The sink emerges during training',
            (BASELINE, 'emergence:*'),
            'Published: Sink_1 rises between 1,000 and 2,000 steps. Rows of `emergence.py` that no paper has show '
            'how the '
            'step moves with weight decay, rate and width: see [Emergence](../results/emergence.md).',
        ),
        Entry(
            'Table 9 (ICLR), Figure 2B (v1)',
            'Learning rate and number of steps',
            ('optimization:rate_*',),
        ),
        Entry('Table 6 (v1)', 'Batch size', (BASELINE, 'optimization:batch_*')),
        Entry('Section 4 (v1)', 'Schedule of the learning rate', ('optimization:cosine',)),
    ),
    'Data': (
        Entry('Figure 2C (v1), Figure 28 (ICLR)', 'Amount of unique training data', ('data:amount_*',)),
        Entry('Section 5 (v1)', 'Random tokens at the first positions', ('data:random_*',)),
        Entry('Table 7 (v1)', 'A token that is the same in every sequence', ('data:fixed_*',)),
    ),
    'Loss': (
        Entry('Table 1 (v1)', 'Weight decay', (BASELINE, 'optimization:decay_*')),
        Entry('Figure 3B (v1)', 'Prefix language modeling', ('objective:prefix_*',)),
        Entry(
            'Figure 2D (v1)',
            'Window attention',
            ('objective:full', 'objective:window_*', 'objective:block_*'),
            claims=('window',),
        ),
    ),
    'Architecture': (
        Entry('Table 2 (v1)', 'Position encoding', ('positions:*',)),
        Entry(
            'Table 8 (v1)',
            'Feed-forward network',
            ('blocks:swiglu', *(f'blocks:{name}*' for name in ('relu', 'gelu', 'swish', 'reglu', 'geglu'))),
        ),
        Entry('Table 9 (v1)', 'Number and combination of heads', ('blocks:swiglu', 'blocks:heads_*', 'blocks:add*')),
        Entry('Appendix D.3 (v1)', 'Post-norm', ('blocks:post_norm',)),
    ),
    'Attention biases': (
        Entry(
            'Table 3 (v1)',
            'Sink token, KV, K and V biases',
            ('columns:none', 'columns:sink_token', 'columns:kv', 'columns:k', 'columns:v'),
        ),
        Entry('Table 10 (v1)', 'K bias with a fixed value', ('columns:k_first_*', 'columns:k_uniform_*')),
        Entry(
            'Table 11 (v1), Table 12 (ICLR)',
            'Biases that heads share',
            ('columns:kv', 'columns:kv_shared', 'columns:k', 'columns:k_shared'),
        ),
        Entry('Table 13 (ICLR)', 'K bias with few learned dimensions', ('columns:k_width_*',)),
    ),
    'Attention operation': (
        Entry(
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
        Entry('Table 12 (v1)', 'Softmax rows that sum to alpha', ('attention:softmax', 'attention:alpha_*')),
        Entry('Appendix D.4 (ICLR)', 'Normalization by a p-norm', ('attention:softmax_p_*', 'attention:sigmoid_p_*')),
        Entry(
            'Table 14 (v1)',
            'Sigmoid without normalization: learning rate and weight decay',
            ('attention:sigmoid', 'attention:sigmoid_decay_*', 'attention:sigmoid_rate_*'),
        ),
        Entry(
            'Section 7.3 (v1)',
            'Softmax and sigmoid at 1B',
            ('scale:*',),
            'Sizes between 60M and 1B are of this project.',
            takes='The larger sizes were not run. `configs/scale.py` has the estimates of the compiler: 61 (60M), '
            '106 (150M), 250 (350M) and 890 (1B) chip-hours of TPU v5e for each of the two.',
            claims=('1b',),
        ),
        Entry(
            'Appendix E (ICLR)',
            'Supervised fine-tuning of the 1B pair',
            ('fine_tuning:*',),
            takes='Not run: it begins with the 1B pair above, and takes UltraChat-200k.',
        ),
    ),
    'Talk: packing and BOS (Barbero et al., 2504.02732)': (
        Entry('Slides; 2504.02732', 'Masks over documents and BOS tokens', ('packing:*',)),
        Entry(
            '2504.02732, context length',
            'Context length at a constant number of tokens',
            ('beyond:context_*',),
            takes='Not run: windows of 2048 tokens are too long for the quickstart size.',
            claims=('context',),
        ),
    ),
    'StreamingLLM (Xiao et al., 2309.17453)': (
        Entry(
            'Section 3.3, Table 3; section 4.2',
            'Models pre-trained with a sink token or a zero sink, under small caches',
            ('beyond:streaming_*',),
            'Perplexities X+Y are of a cache of the X first and the Y last keys. `sinklab stream` measures them of '
            'any '
            'trained model; [its speed](../results/streaming.md) was measured, the published models were not '
            'trained.',
            ('sinklab stream runs/streaming_vanilla --source=text:pg19/book.txt --cache=0+1024,4+1020',),
            takes='Not run: three runs of 160M parameters and 75B tokens, and the first test book of PG19.',
            claims=('streaming',),
        ),
    ),
    'Later work': (
        Entry(
            '2409.04431, 2410.17174, 2504.20966',
            'Sigmoid with an offset, softmax-off-by-one, softpick',
            ('attention:sigmoid_apple', 'attention:softmax_off_by_one', 'attention:softpick'),
        ),
        Entry(
            '2410.13835',
            'Bigram-Backcopy and ReLU attention (Guo et al.)',
            ('bigram_backcopy:*', 'attention:relu'),
            'Published in words and figures only. A row takes about a minute on two cores; its notes have results '
            'of this '
            'project.',
        ),
        Entry('gpt-oss', 'A learned logit in the sum of softmax', ('columns:logit',)),
        Entry(
            '2505.06708, 2510.09017',
            'Gated attention (Qiu et al.; value-state gates)',
            ('blocks:gate_*',),
        ),
        Entry(
            '2603.05498, 2605.06611',
            'Sandwich norm, QK norm, head norm',
            ('blocks:sandwich_norm', 'blocks:qk_norm', 'blocks:head_norm'),
        ),
        Entry(
            '2410.17174, 2506.19697',
            'Optimizers: SGD and Muon',
            ('optimization:sgd', 'optimization:muon'),
            claims=('muon',),
        ),
        Entry('2603.17771', 'Gradient sinks (Chen et al.)', ('beyond:gradient_sinks',)),
    ),
}


def page() -> str:
    """Return the Markdown of the page."""
    entries = [entry for group in GROUPS.values() for entry in group]
    words = (
        '# Tables and figures of the paper\n\n'
        'This page lists every table and figure of "When Attention Sink Emerges in Language Models" (Gu et al.), '
        'and of '
        'later work, that sinklab can run: the rows, the command, the published numbers, and ours where they were '
        'run.\n\n' + introduction(entries) + contents()
    )
    for group, found in GROUPS.items():
        words += f'## {group}\n\n' + ''.join(map(section, found))
    return words + '\n<!-- Generated by docs/paper_tables.py; edits belong there. -->\n'


def introduction(entries: list[Entry]) -> str:
    """Return what was run, and how to read the columns."""
    found, judged = measured(), Counter(one['verdict'] for one in verdicts().values())
    rows = {row for entry in entries for row in rows_of(entry)}
    run = sum(ours_of(row) is not None for row in rows)
    seeds = sorted({len(seeds) for seeds in found['runs'].values()})
    return (
        f'**What was run.** {run} of {len(rows)} rows have a result in `docs/results/claims.json`, all of them at '
        f'size `{found["size"]}`: 200,000 '
        f'parameters, on two CPU cores, with {seeds[0]} to {seeds[-1]} seeds. No row was trained at the size of the '
        f'paper. Verdicts on {sum(judged.values())} [claims](../results/claims.md): '
        + ', '.join(f'{judged[verdict]} {verdict}' for verdict in claims_report.VERDICTS if judged[verdict])
        + '.\n\n'
        '**Published** numbers are of the size of the paper (60M parameters unless the title says otherwise). '
        '**Ours** are '
        f'of size `{found["size"]}`: the mean of all seeds and their standard deviation. Only directions can be '
        f'compared '
        'between the two. Numbers of a row scale with the size: where a row has another value there, it stands '
        'below. '
        'A dash: not run.\n\n'
        '**What a row takes.** At the size of the paper: the last column has the operations of the run as a '
        'multiple of '
        f'the baseline, which takes at least {CHIP_HOURS} chip-hours of TPU v5e by the estimate of the compiler '
        f'(`sinklab compile`, not measured). At size `{found["size"]}`: about two minutes for two runs at once on '
        f'two '
        'cores; rows without a result were left out to save time, and the command of their table trains them. Data '
        'of the '
        'paper: a sample of the Pile (`sail/regmix-data-sample`) with the tokenizer of GPT-NeoX.\n\n'
        '(v1) is arXiv 2410.10781v1, (ICLR) the version printed for ICLR 2025; they number tables differently. '
        '[Decisions](decisions.md) says how unclear passages were read.\n\n'
    )


def contents() -> str:
    lines = (
        [f'[{escape(entry.where)}](#{slug(entry)})', escape(entry.title), status(entry)]
        for group in GROUPS.values()
        for entry in group
    )
    return table(['table or figure', 'what it shows', 'rows with a result of ours'], lines)


def slug(entry: Entry) -> str:
    kept = ''.join(one if one.isalnum() else '-' for one in entry.where.lower())
    return '-'.join(filter(None, kept.split('-')))


def status(entry: Entry) -> str:
    rows = rows_of(entry)
    return (
        f'{sum(ours_of(row) is not None for row in rows)} of {len(rows)}'
        if rows
        else 'not run'
        if entry.takes
        else ''
    )


def section(entry: Entry) -> str:
    """Return one table or figure of the paper."""
    words = f'### {escape(entry.where)}: {escape(entry.title)} {{ #{slug(entry)} }}\n\n'
    words += f'{entry.words}\n\n' if entry.words else ''
    if commands := [*training(entry), *entry.commands]:
        words += '```console\n' + '\n'.join(commands) + '\n```\n\n'
    if rows := rows_of(entry):
        words += table(['row', 'published', f'ours ({measured()["size"]})', 'cost'], map(line, rows))
    if entry.where.startswith('Table 5'):
        words += open_models()
    words += f'{entry.takes}\n\n' if entry.takes else ''
    return words + claims_of(entry)


def training(entry: Entry) -> Iterator[str]:
    """Return one command for the rows of each file."""
    for name, rows in itertools.groupby(rows_of(entry), key=lambda row: row.partition(':')[0]):
        yield TRAINED.format(table=name, rows=','.join(row.partition(':')[2] for row in rows))


def line(row: str) -> list[str]:
    """Return the cells of a row."""
    file, _, name = row.partition(':')
    about = all_rows()[row]
    notes = escape(sentence(about['note'])) if about.get('note') else ''
    link = f'[{code(row)}](../reference/rows.md#{file_slug(file)}-{name})'
    return [link, published(about['published']) or notes or 'nothing', ours(row), f'× {cost(row):.2g}']


def ours(row: str) -> str:
    """Return our numbers of a row, with what the row sets at that size where that is another value."""
    found = ours_of(row)
    if found is None:
        return '-'
    names = [
        'sink/1',
        *(name for name in ('sink/2', 'sink/star') if name in all_rows()[row]['published']),
        'valid/loss',
    ]
    parts = []
    for name in names:
        if values := [one['end'][name] for one in found.values() if name in one['end']]:
            parts.append(f'{code(name)} {spread_text(values, name)}')
    fails = [one for one in found.values() if one['end'].get('fails')]
    parts += [f'fails in {len(fails)} of {len(found)}'] if fails or all_rows()[row]['published'].get('fails') else []
    there = scaled(row)
    return '<br>'.join([*parts, f'{len(found)} seeds', *(f'with {one}' for one in there)])


def spread_text(values: list[float], name: str) -> str:
    found, entry = spread(values), number(name)
    digits = 1 if entry and entry.unit == '%' else 3
    return f'{found["mean"]:.{digits}f}' + ('' if found['sd'] is None else f' ± {found["sd"]:.{digits}f}')


def scaled(row: str) -> list[str]:
    """Return the values that a row has at the size of our results, where they are not those of the paper."""
    here = flat(dataclasses.asdict(spec_of(row, measured()['size'])))
    return [
        f'`{path}={shown(here[path])}`' for path, value in all_rows()[row]['diff'].items() if here.get(path) != value
    ]


def cost(row: str) -> float:
    """Return the operations of a run at the size of the paper, as a multiple of the baseline."""
    return operations(spec_of(row, None)) / operations(spec_of(BASELINE, None))


def operations(spec: Spec) -> float:
    return flops.step(spec) * spec.optimizer.steps


def open_models() -> str:
    inputs = list(dict.fromkeys(name for found in PUBLISHED.values() for name in found))
    lines = (
        [code(model), *(f'{found[one]:.2f}' if one in found else '' for one in inputs)]
        for model, found in PUBLISHED.items()
    )
    return 'Published Sink_1 in percent, at T = 64:\n\n' + table(['model', *inputs], lines)


def claims_of(entry: Entry) -> str:
    """Return the verdicts on claims that are about the rows of an entry, or that it names."""
    rows, known = set(rows_of(entry)), claims()
    names = [name for name, one in known.items() if name in entry.claims or (one.of and one.of.row in rows)]
    if not names:
        return ''
    lines = ''.join(f'- {claim_line(verdicts()[name])}\n' for name in names)
    return f'Claims, and what our runs say:\n\n{lines}\n'


def claim_line(found: dict) -> str:
    name, _, here, seeds, verdict = claims_report.cells(found)
    unit = ' percentage points' if found['unit'] == '%' else ''
    said = f', difference {here}{unit}, {seeds} seeds' if here else ''
    why = f': it {escape(found["why"])}' if found['why'] else ''
    return f'{code(name)} {anchor(f"claim-{name}")}{escape(found["words"])} **{escape(verdict)}**{escape(said)}{why}'


# What is in the repository


@functools.cache
def all_rows() -> dict[str, dict[str, Any]]:
    """Return {TABLE:ROW: what the row is about} of all files of configs/."""
    return {
        f'{file_slug(file)}:{name}': row for file in config.config_files() for name, row in config.rows(file).items()
    }


@functools.cache
def rows_of(entry: Entry) -> tuple[str, ...]:
    """Return the rows of an entry, in the order of its patterns."""
    found = [row for pattern in entry.rows for row in fnmatch.filter(all_rows(), pattern)]
    return tuple(dict.fromkeys(found))


@functools.cache
def measured() -> dict[str, Any]:
    return results.read(RESULTS)


@functools.cache
def claims() -> dict[str, Any]:
    return claims_report.claims(config.module_of('configs/claims.py', 'CLAIMS').CLAIMS)


@functools.cache
def verdicts() -> dict[str, dict]:
    return {one['claim']: one for one in claims_command.entries_of(claims(), measured())}


@functools.cache
def spec_of(row: str, size: str | None) -> Spec:
    table, _, name = row.partition(':')
    return config.load(f'configs/{table}.py:{name}', [], size)[0]


@functools.cache
def runs_by_config() -> dict[str, dict]:
    """Return {config as text: runs by seed} of the measured rows."""
    base = results.first(measured()['configs'])
    return {
        key(base | own): measured()['runs'][row]
        for row, own in measured()['configs'].items()
        if row in measured()['runs']
    }


def key(config: dict[str, Any]) -> str:
    return repr(sorted(config.items(), key=lambda item: item[0]))


@functools.cache
def ours_of(row: str) -> dict[str, dict] | None:
    """Return our runs by seed: those of a measured row with the same config; None where there are none."""
    try:
        here = results.config_of(spec_of(row, measured()['size']))
    except Refusal:
        return None
    then = results.first(measured()['configs'])  # a field that came later is none of the measured ones
    return runs_by_config().get(key({path: here.get(path) for path in then}))


def unlisted(entries: Iterable[Entry] = ()) -> list[str]:
    """Return the rows that no entry has; those of configs/quickstart.py are rows of other files."""
    entries = list(entries) or [entry for group in GROUPS.values() for entry in group]
    listed = {row for entry in entries for row in rows_of(entry)}
    return [row for row in all_rows() if row not in listed and not row.startswith('quickstart:')]


if __name__ == '__main__':
    print(page())
