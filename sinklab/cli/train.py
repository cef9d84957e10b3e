"""Train a language model, and measure its attention sinks on the way.

DIR gets config.json, metrics.jsonl, probes and checkpoints. The same command, given again, goes on from the newest
checkpoint; a run that is done is left as it is. Ctrl-C and SIGTERM save a checkpoint first. --config.PATH=VALUE sets
a field of the config, such as --config.optimizer.steps=500; configs/default.py lists all fields.

example:
  sinklab train --config=configs/quickstart.py:softmax --workdir=runs/softmax --config.optimizer.steps=500
  sinklab train --from=runs/softmax@500 --config.optimizer.steps=900 --workdir=runs/longer
  sinklab train --from=params:runs/softmax --config.optimizer.peak_learning_rate=1e-4 --workdir=runs/anew
  sinklab train --from=hf:models/llama --config.data.source=store:stores/text --workdir=runs/llama
"""

import argparse
import contextlib
import dataclasses
import functools
import platform
import sys
from typing import Any

from sinklab.checkpoint import digests
from sinklab.cli import (
    compilation_flags,
    config_flags,
    malloc,
    parallelism_flags,
    process_flags,
    warm_start_flags,
)
from sinklab.cli.command_line import get_program_argv
from sinklab.config.spec import Hardware, Spec
from sinklab.escape import escape_control, join_shell
from sinklab.process_group import (
    ProcessGroup,
    SingleProcessGroup,
    check_equal_on_all,
    run_on_all_or_raise,
)
from sinklab.run_dir import RunDir, flatten_dict
from sinklab.schema import UserError
from sinklab.storage.paths import make_absolute
from sinklab.supervisor import worker_client
from sinklab.supervisor.exit_status import ExitStatus


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        '--config',
        metavar='FILE[:ROW]',
        help='config file, and a row of it, such as configs/quickstart.py:softmax; configs/default.py has all fields',
    )
    parser.add_argument(
        '--from',
        dest='origin',
        metavar='[params:]RUN[@STEP]',
        help='start from a checkpoint of another run, the newest if no step is given, such as runs/softmax@500; with '
        'params: take its parameters alone and count steps anew; hf:PATH: start from a model of transformers. '
        'Without --config the config of that run is used',
    )
    add_size_argument(parser)
    parser.add_argument(
        '--workdir',
        required=True,
        metavar='DIR',
        help='run folder: a new one, or one to go on with, such as runs/softmax',
    )
    parallelism_flags.add_arguments(parser)
    compilation_flags.add_cache_argument(parser)
    parser.add_argument(
        '--tensorboard', action='store_true', help='also write TensorBoard events into DIR/tensorboard'
    )
    parser.add_argument('--wandb', action='store_true', help='also write an offline run of Weights & Biases into DIR')
    parser.add_argument(
        '--profile',
        metavar='STEP:COUNT',
        help='trace COUNT steps after STEP into DIR/profile, for XProf, such as 100:5; the trace may contain one '
        'step more at each end, and compilation if it contains one of the first two steps',
    )
    process_flags.add_arguments(parser)
    parser.usage = (
        '%(prog)s (--config FILE[:ROW] [--size SIZE] | --from [params:]RUN[@STEP]) --workdir DIR '
        '[--config.PATH=VALUE ...] [options]'
    )


def add_size_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        '--size',
        metavar='SIZE',
        help='paper, quickstart (minutes on two cores) or smoke (seconds; learns nothing): model and step counts of '
        'configs/sizes.py; without it the size that FILE has',
    )


def run(args: argparse.Namespace, extra_args: list[str]) -> int:
    malloc.ask_for_large_pages()
    if worker_client.is_supervised():
        process_flags.run_worker(functools.partial(run_training, args, extra_args))
    process_info = process_flags.parse_process_info(args)
    if process_info.count > 1 or args.supervise or args.restarts:
        command = [*get_program_argv(), *sys.argv[1:]]
        is_this_run = functools.partial(has_requested_run, args, extra_args)
        return process_flags.supervise_run(
            command,
            process_info,
            process_flags.parse_timeouts(args),
            RunDir(args.workdir),
            is_this_run,
            args.restarts,
        )
    return run_training(args, extra_args, SingleProcessGroup()).exit_code


def has_requested_run(args: argparse.Namespace, extra_args: list[str]) -> bool:
    """Return whether the run folder holds the requested run."""
    run_dir = RunDir(args.workdir)
    if not run_dir.has_run():
        return False
    try:
        parent = warm_start_flags.resolve_parent(args.origin, run_dir, SingleProcessGroup())
        run_dir.check_spec(load_requested_spec(args, extra_args, run_dir, parent)[0])
    except (OSError, ValueError):
        return False
    return True


def run_training(args: argparse.Namespace, extra_args: list[str], group: ProcessGroup) -> ExitStatus:
    """Train a run as one process of a group.

    Args:
        args: The parsed arguments.
        extra_args: Overrides --config.PATH=VALUE.
        group: The group of a single process, or the group of supervised workers.

    Returns:
        The exit status, on which all processes agree.

    Raises:
        UserError: The arguments are invalid on any process, or differ between processes.
    """
    from sinklab.parallel import device_mesh

    run_dir = run_on_all_or_raise(group, 'folder', lambda: RunDir(args.workdir))
    parent = warm_start_flags.resolve_parent(args.origin, run_dir, group)
    spec, row, description, expected = run_on_all_or_raise(
        group, 'config', lambda: load_requested_spec(args, extra_args, run_dir, parent)
    )
    layout = run_on_all_or_raise(group, 'layout', lambda: parallelism_flags.parse_hardware(args))
    device_mesh.split_cpu_devices(layout, group.count)
    compilation_flags.set_fast_compile_flags(row['size'])
    check_equal_on_all(group, 'run', collect_shared_settings(spec, layout))
    compilation_cache = run_on_all_or_raise(
        group, 'programs', lambda: compilation_flags.CompilationCache(args.compiled)
    )
    profile_steps = run_on_all_or_raise(group, 'profile', lambda: parse_profile_steps(args, run_dir, spec))
    worker_client.initialize_distributed(group)
    origin = (
        run_on_all_or_raise(group, 'origin', lambda: warm_start_flags.load_warm_start(parent)) if parent else None
    )
    with contextlib.ExitStack() as stack:
        progress = start_progress(row, spec, compilation_cache, description, stack) if group.index == 0 else None
        other_callbacks = make_callbacks(args, run_dir, profile_steps, progress.on_message, stack) if progress else []
        callbacks = [*([progress] if progress else []), *other_callbacks]
        exit_status, records = run_loop(
            spec, layout, run_dir, row, *callbacks, group=group, origin=origin, grace_seconds=args.grace
        )
        if progress and (exit_status.exit_code == 0 or isinstance(group, SingleProcessGroup)):
            progress.finish(
                exit_status,
                f'sinklab train: {process_flags.format_exit_status(exit_status)}',
                lambda: print_results(run_dir, row, records, expected),
            )
    return exit_status


def load_requested_spec(
    args: argparse.Namespace, extra_args: list[str], run_dir: RunDir, parent: warm_start_flags.ParentCheckpoint | None
) -> tuple[Spec, dict, str | None, config_flags.ExpectedSinks | None]:
    """Load the requested spec, from a config file or from the parent run of a fork.

    Returns:
        The spec; the content of row.json; a line about the fields that the row changes or about the optimizer; and
        the expected sinks of the config file.

    Raises:
        UserError: Neither --config nor --from is given, or the config is invalid.
    """
    if args.config:
        return config_flags.load_and_describe(args.config, extra_args, args.size)
    if not parent:
        raise UserError(
            'neither --config nor --from is given; give --config=FILE[:ROW], such as configs/quickstart.py:softmax'
        )
    if args.size:
        raise UserError(
            f'--size={args.size} is for a row of --config; leave it out, the size of a run is carried over'
        )
    source_dir = parent.run_dir if parent.run_dir.has_run() else run_dir
    spec, row = config_flags.load_run_config(source_dir, make_absolute(run_dir.path).name, extra_args)
    description = config_flags.describe_optimizer_source(row, spec) if parent.takes == 'params' else None
    expected = (
        config_flags.load_expected_sinks(row['config'], row['size'], row['overrides']) if row['config'] else None
    )
    return spec, row, description, expected


def run_loop(
    spec: Spec,
    layout: Hardware,
    run_dir: RunDir,
    row: dict,
    *callbacks: Any,
    group: ProcessGroup,
    origin: Any,
    grace_seconds: float,
) -> tuple[ExitStatus, list[dict]]:
    """Run the training loop.

    Returns:
        The exit status, on which all processes agree; and the metric records, which are [] unless the run is done.
    """
    from sinklab.train import loop
    from sinklab.train.run_status import (
        DivergedError,
        ReplicaMismatchError,
        StoppedBySignal,
        classify_error,
    )

    try:
        records = loop.train(
            spec, layout, run_dir, row, *callbacks, group=group, origin=origin, grace_seconds=grace_seconds
        )
    except DivergedError as error:
        return classify_error(error).replace_words(
            f'{error}: the run has diverged; {format_last_checkpoint(run_dir)}'
        ), []
    except (ReplicaMismatchError, StoppedBySignal) as error:
        return classify_error(error), []
    return ExitStatus('done', f'{run_dir}: {format_last_record(records[-1])}' if records else ''), records


def start_progress(
    row: dict, spec: Any, compilation_cache: Any, description: str | None, stack: contextlib.ExitStack
) -> Any:
    """Start the progress display of the run, which ends with the exit stack."""
    from sinklab.cli.progress import ProgressCallback

    return stack.enter_context(
        ProgressCallback(row['row'] or row['config'], spec, compilation_cache, row_description=description)
    )


def parse_profile_steps(args: argparse.Namespace, run_dir: RunDir, spec: Spec) -> range | None:
    """Parse --profile into the range of steps to trace; return None if it is not given."""
    from sinklab.train import callbacks as callbacks_module

    return (
        None
        if args.profile is None
        else callbacks_module.parse_profile_steps(args.profile, run_dir, spec.optimizer.steps)
    )


def make_callbacks(
    args: argparse.Namespace,
    run_dir: RunDir,
    profile_steps: range | None,
    print_message: Any,
    stack: contextlib.ExitStack,
) -> list:
    """Make the requested callbacks of the training loop: TensorBoard, Weights & Biases and the profiler."""
    from sinklab.train import callbacks as callbacks_module
    from sinklab.train.callbacks import BestEffortCallback

    callbacks = (
        [BestEffortCallback(callbacks_module.TensorBoardCallback(run_dir), 'TensorBoard', print_message)]
        if args.tensorboard
        else []
    )
    if args.wandb:
        callbacks.append(
            BestEffortCallback(
                stack.enter_context(callbacks_module.WandbCallback(run_dir)), 'Weights & Biases', print_message
            )
        )
    return callbacks + (
        [stack.enter_context(callbacks_module.ProfilerCallback(run_dir, profile_steps, print_message))]
        if profile_steps
        else []
    )


def collect_shared_settings(spec: Any, layout: Any) -> dict[str, Any]:
    """Collect the settings that must be equal on all processes: versions, layout and config.

    The path of a token store is left out, because it may differ between processes; the digest of the store is
    compared instead.
    """
    import sinklab
    from sinklab.train.setup import get_commit, get_package_versions

    config_flags = flatten_dict(dataclasses.asdict(spec), 'config')
    if str(config_flags['config.data.source']).startswith('store:'):
        del config_flags['config.data.source']
    code_versions = dict(sinklab=sinklab.__version__, commit=get_commit(), python=platform.python_version())
    return code_versions | get_package_versions() | flatten_dict(dataclasses.asdict(layout), 'layout') | config_flags


def format_last_record(record: dict) -> str:
    """Format the last record of a run in one line."""
    from sinklab.metrics.registry import METRIC_INFOS

    infos = [info for info in METRIC_INFOS if info.in_table and info.name in record]
    metrics_text = ', '.join(f'{info.label} {info.format_value(record[info.name])}' for info in infos)
    return f'step {record["step"]}, valid loss {record["valid/loss"]:.3f}, {metrics_text}, {record["seconds"]:.0f} s'


def print_results(
    run_dir: RunDir, row: dict, records: list[dict], expected: config_flags.ExpectedSinks | None
) -> None:
    """Print the results of a finished run: a table with a line for each metric, and the next command."""
    from sinklab.cli import terminal
    from sinklab.report import summary_table

    if not records:
        return
    name, console = row['row'] or row['config'], terminal.make_console(width=100)
    headings, rows = summary_table.make_metric_table(records, row.get('published') or {})
    console.print(escape_control(f'{name}: done, {summary_table.format_duration(records[-1])}'), soft_wrap=True)
    terminal.print_table(console, headings, rows, left_columns=['what it is'], wrap_columns=['what it is'])
    if published := summary_table.describe_published(row, headings):
        console.print(escape_control(published), soft_wrap=not console.is_terminal)
    summary = summary_table.format_comparison(
        {name: summary_table.summarize_sink(records)},
        *(expected or summary_table.collect_published_rates({name: row})),
    )
    console.print(escape_control(f'{summary}; run: {run_dir}'), soft_wrap=not console.is_terminal)
    print(f'For a page with pictures: {join_shell(["sinklab", "report", run_dir])}')


def format_last_checkpoint(run_dir: RunDir) -> str:
    step = digests.find_newest_step(run_dir)
    return (
        'no checkpoint was saved'
        if step is None
        else f'the last good checkpoint is {run_dir.checkpoint_dir / str(step)}'
    )
