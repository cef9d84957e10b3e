"""Experiment: change softmax attention to sigmoid attention, or back, at ten steps of training.

    python -m benchmarks.switch_attention --workdir=runs/switch --seeds=3 --jobs=2
    python -m benchmarks.switch_attention --workdir=runs/switch --seeds=3 --write

For each seed, a run with softmax attention and one with sigmoid attention (`sigmoid_minus_log_t`) are trained at the
size quickstart, with a checkpoint at each of SWITCH_STEPS. From each checkpoint a warm start continues with the
other attention to the last step. Parameters, optimizer state, schedule and the order of the data continue; nothing
else differs. Finished runs are not trained again, so the command can be stopped and repeated. --write only reads the
runs, and writes docs/results/switch.json, switch.png and the table of mechanism.md.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.argument_types import parse_count, parse_seed_list
from docs.page_parts import write_part
from docs.reference import format_table
from sinklab.cli.config_flags import load_spec
from sinklab.run_dir import RunDir
from sinklab.sweep.run import pin_to_cores, split_cores

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / 'docs' / 'results'
SWITCH_STEPS = 100, 200, 300, 400, 500, 600, 700, 800, 1000, 1200  # most sinks emerge between step 250 and 950
ROWS = 'softmax', 'sigmoid_minus_log_t'  # rows of configs/attention.py
OPTIONS = '--data=1', '--fsdp=1', '--remat=attention,ffn'
METRICS = 'sink/1', 'alpha/1', 'mass/row', 'contribution/1', 'norm/value/ratio', 'norm/key/ratio'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--workdir', type=lambda text: Path(text).resolve(), required=True)
    parser.add_argument('--seeds', type=parse_seed_list, default='3')
    parser.add_argument('--jobs', type=parse_count, default=1)
    parser.add_argument('--write', action='store_true')
    args = parser.parse_args()
    if args.write:
        write_results(args.workdir, args.seeds)
        return
    first_runs = [make_first_command(args.workdir, row, seed) for seed in args.seeds for row in ROWS]
    children = [
        make_fork_command(args.workdir, row, seed, switch_step)
        for seed in args.seeds
        for row in ROWS
        for switch_step in SWITCH_STEPS
    ]
    run_commands(first_runs, args.jobs)
    run_commands(children, args.jobs)


def get_run_path(workdir: Path, row: str, seed: int, switch_step: int | None = None) -> Path:
    """Return the folder of the run of a row, or of the warm start that changes attention at `switch_step`."""
    return workdir / (f'{row}-{seed}' if switch_step is None else f'{row}-{seed}-{switch_step}')


def get_other_row(row: str) -> str:
    return ROWS[1 - ROWS.index(row)]


def format_attention_flags(row: str) -> list[str]:
    """Format the flags that set the attention of a row: the fields in which the rows differ."""
    fields, other_fields = (
        dataclasses.asdict(load_spec(f'{ROOT}/configs/attention.py:{name}', [], 'quickstart')[0].model.attention)
        for name in (row, get_other_row(row))
    )
    return [
        f'--config.model.attention.{name}={fields[name]}' for name in fields if fields[name] != other_fields[name]
    ]


def make_first_command(workdir: Path, row: str, seed: int) -> list[str]:
    checkpoints = ['--config.checkpoint.every_steps=100', '--config.checkpoint.keep=16']
    probes = ['--config.probe.every_steps=20']
    seeds = [f'--config.seed={seed}', f'--config.data.seed={seed}']
    config_flag = f'--config={ROOT}/configs/attention.py:{row}'
    return [
        config_flag,
        '--size=quickstart',
        *checkpoints,
        *probes,
        *seeds,
        f'--workdir={get_run_path(workdir, row, seed)}',
    ]


def make_fork_command(workdir: Path, row: str, seed: int, switch_step: int) -> list[str]:
    checkpoints = ['--config.checkpoint.every_steps=0', '--config.checkpoint.keep=2']
    source = f'--from={get_run_path(workdir, row, seed)}@{switch_step}'
    probes = ['--config.probe.every_steps=100']
    attention = format_attention_flags(get_other_row(row))
    return [source, *attention, *checkpoints, *probes, f'--workdir={get_run_path(workdir, row, seed, switch_step)}']


def run_commands(commands: list[list[str]], jobs: int) -> None:
    """Train runs in parallel, each on its share of the cores; begin no other run and exit if one fails."""
    cores = iter(split_cores(jobs))
    with ThreadPoolExecutor(jobs, initializer=lambda: pin_to_cores(next(cores))) as pool:
        for command, exit_code in zip(commands, pool.map(train, commands), strict=True):
            if exit_code:
                pool.shutdown(cancel_futures=True)
                sys.exit(f'switch_attention: {command[-1]} ended with exit code {exit_code}')


def train(options: list[str]) -> int:
    """Train one run, if it is not finished; return its exit code."""
    path = Path(options[-1].removeprefix('--workdir='))
    if is_finished(path):
        return 0
    print(path, flush=True)
    command = [sys.executable, '-m', 'sinklab', 'train', *options, *OPTIONS]
    return subprocess.run(command, stdout=subprocess.DEVNULL, cwd=ROOT).returncode


def is_finished(path: Path) -> bool:
    outcome = path / 'outcome.json'
    return outcome.exists() and json.loads(outcome.read_text())['kind'] == 'done'


def write_results(workdir: Path, seeds: list[int]) -> None:
    results = {
        row: {
            str(seed): {
                'unchanged': read_curves(get_run_path(workdir, row, seed)),
                **{
                    str(switch_step): read_curves(get_run_path(workdir, row, seed, switch_step))
                    for switch_step in SWITCH_STEPS
                },
            }
            for seed in seeds
        }
        for row in ROWS
    }
    (RESULTS / 'switch.json').write_text(json.dumps(results, indent=1) + '\n')
    write_part(RESULTS / 'mechanism.md', 'switch', format_results(results))
    draw_results(results, RESULTS / 'switch.png')


def format_results(results: dict) -> str:
    """Format the last Sink_1 and the last loss of all warm starts: a line for each row and seed."""
    table_rows = []
    for label, read in (('Sink_1 (%)', get_last_sink), ('loss (nats)', get_loss)):
        digits = 1 if read is get_last_sink else 2
        for row, runs in results.items():
            for seed, children in runs.items():
                cells = [
                    f'{read(children[switch_step]):.{digits}f}'
                    for switch_step in (*map(str, SWITCH_STEPS), 'unchanged')
                ]
                table_rows.append([label, f'`{row}`, {seed}', *cells])
    return format_table(
        ['at the end', 'from, seed', *(f'step {switch_step}' for switch_step in SWITCH_STEPS), 'unchanged'],
        table_rows,
    )


def get_last_sink(curves: dict) -> float:
    return curves['sink/1'][-1]


def get_loss(curves: dict) -> float:
    return curves['loss']


def read_curves(path: Path) -> dict:
    """Read the steps and the values of METRICS of all probes of a run, and its last validation loss."""
    if not is_finished(path):
        sys.exit(f'switch_attention: the run {path} is missing or not finished; run this command without --write')
    run_dir = RunDir(path)
    records = run_dir.read_records()
    probes = [record for record in records if 'sink/1' in record]
    curves = {name: [round(probe[name], 4) for probe in probes] for name in METRICS}
    losses = [record['valid/loss'] for record in records if 'valid/loss' in record]
    return dict(step=[probe['step'] for probe in probes], **curves, loss=losses[-1])


def draw_results(results: dict, path: Path) -> None:
    """Draw the last Sink_1 and the last loss of all warm starts by the step of the change."""
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(9, 5.5), sharex=True, sharey='row')
    for column, (row, runs) in zip(axes.T, results.items(), strict=True):
        for index, (seed, children) in enumerate(runs.items()):
            for axis, read in zip(column, (get_last_sink, get_loss), strict=True):
                values = [read(children[str(switch_step)]) for switch_step in SWITCH_STEPS]
                axis.plot(SWITCH_STEPS, values, 'o-', ms=4, color=f'C{index}', label=f'seed {seed}')
                axis.axhline(read(children['unchanged']), ls=':', color=f'C{index}')
        column[0].set_title(f'{row} changed to {get_other_row(row)}')
        column[1].set_xlabel('step of the change (dotted: not changed)')
    last_step = max(
        curves['step'][-1] for runs in results.values() for children in runs.values() for curves in children.values()
    )
    axes[0, 0].set_ylabel(f'Sink_1 at step {last_step}, %')
    axes[1, 0].set_ylabel('valid loss, nats')
    axes[0, 1].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)


if __name__ == '__main__':
    main()
