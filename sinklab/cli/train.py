"""Train a language model, and measure its attention sinks during training.

DIR gets config.json, metrics.jsonl, probes and checkpoints. The same command, given again, continues from the newest
checkpoint; a finished run is not changed. Ctrl-C and SIGTERM save a checkpoint first. --config.PATH=VALUE sets
a field of the config, such as --config.optimizer.steps=500; configs/default.py lists all fields.

example:
  sinklab train --config=configs/quickstart.py:softmax --workdir=runs/softmax --config.optimizer.steps=500
  sinklab train --from=runs/softmax@500 --config.optimizer.steps=900 --workdir=runs/longer
  sinklab train --from=params:runs/softmax --config.optimizer.peak_learning_rate=1e-4 --workdir=runs/anew
  sinklab train --from=hf:models/llama --config.data.source=store:stores/text --workdir=runs/llama
  sinklab train --from=gguf:SmolLM2.gguf --config.data.source=store:stores/text --workdir=runs/smollm
"""

import argparse
import dataclasses
import shlex
import sys
from typing import Any, get_args

from sinklab.checkpoint import digests
from sinklab.cli import config_flags, hf, layout_flags, process_flags, terminal
from sinklab.cli.flag_types import add_options
from sinklab.cli.progress import ProgressCallback
from sinklab.config.differences import flatten_dict
from sinklab.config.spec import Layout, Spec, WarmStartTakes
from sinklab.errors import UserError
from sinklab.process_group import (
    ProcessGroup,
    check_equal_on_all,
    join_processes,
    limit_shutdown,
    run_on_all_or_raise,
)
from sinklab.report import summary_table
from sinklab.run_dir import MODEL_PREFIXES, RunDir, format_run_ref, parse_run_ref, read_spec
from sinklab.storage.paths import join_path, make_absolute, resolve_path
from sinklab.train.callbacks import Callback, TensorBoardCallback, WandbCallback, parse_profile_steps

PROFILE_OPTION = str, 'STEP:COUNT', 'trace COUNT steps from STEP on into DIR/profile, for XProf, such as 100:5'


@dataclasses.dataclass(frozen=True)
class RunRequest:
    """Arguments of a run, parsed and checked by one process."""

    run_dir: RunDir
    parent: Any  # the WarmStart of --from; None without --from, or if the parent of an existing one is gone
    spec: Spec
    row: dict
    descriptions: list[str]
    layout: Layout
    profile_steps: range


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        '--config',
        metavar='FILE[:ROW]',
        help='config file, and a row of it, such as configs/quickstart.py:softmax; configs/default.py has all fields',
    )
    parser.add_argument(
        '--from',
        dest='from_flag',
        metavar='[params:]RUN[@STEP]',
        help='start from a checkpoint of another run, the newest if no step is given, such as runs/softmax@500; with '
        'params: take only its parameters and start at step 0; hf:PATH or gguf:PATH: start from an open model. '
        'Without --config the config of that run is used',
    )
    config_flags.add_size_argument(parser)
    parser.add_argument(
        '--workdir',
        required=True,
        metavar='DIR',
        help='folder of a new run or of one to continue, such as runs/softmax',
    )
    layout_flags.add_arguments(parser)
    add_options(parser, {'compiled': layout_flags.CACHE_OPTION, 'profile': PROFILE_OPTION})
    parser.add_argument(
        '--tensorboard', action='store_true', help='also write TensorBoard events into DIR/tensorboard'
    )
    parser.add_argument('--wandb', action='store_true', help='also write an offline run of Weights & Biases into DIR')
    process_flags.add_arguments(parser)
    parser.usage = (
        '%(prog)s (--config FILE[:ROW] [--size SIZE] | --from [params:]RUN[@STEP]) --workdir DIR '
        '[--config.PATH=VALUE ...] [options]'
    )


def run(args: argparse.Namespace, extra_args: list[str]) -> int:
    """Train a run as one process of a group; `sinklab.cli.main` reports the errors that end it.

    Raises:
        UserError: The arguments are invalid on any process, or differ between processes.
    """
    from sinklab.train import loop

    group = join_processes(args.coordinator, args.processes, args.process, args.join_timeout)
    request = run_on_all_or_raise(group, lambda: prepare_run(args, extra_args, group))
    run_dir, row = request.run_dir, request.row
    settings = collect_shared_settings(request.spec, request.layout, request.parent)
    check_equal_on_all(group, settings | config_flags.hash_registering_files(args))
    loop.train(
        request.spec,
        request.layout,
        run_dir,
        row,
        *(make_callbacks(args, request) if group.process_index == 0 else []),
        group=group,
        parent=request.parent,
        grace_seconds=args.grace,
        step_timeout=args.step_timeout,
        profile_steps=request.profile_steps,
    )
    if group.process_index == 0:
        try:
            print_results(run_dir, row, run_dir.read_records(), config_flags.format_metric_option(args))
            sys.stdout.flush()
        except OSError:
            terminal.discard_stdout()
    limit_shutdown(0)
    return 0


def prepare_run(args: argparse.Namespace, extra_args: list[str], group: ProcessGroup) -> RunRequest:
    """Parse the arguments of a run, and set what must be set before jax starts its devices.

    Raises:
        UserError: An argument is invalid.
    """
    from sinklab.parallel import device_mesh
    from sinklab.train.warm_start import WarmStart

    run_dir = RunDir(args.workdir)
    layout = layout_flags.parse_layout(args)
    device_mesh.split_cpu_devices(layout, group.process_count)
    if args.metric:  # a file of the user may start the devices
        config_flags.load_metric_file(args.metric)
    from_flag = args.from_flag
    if from_flag and from_flag.startswith(MODEL_PREFIXES):
        if group.process_count > 1:
            raise UserError(
                f'--from={from_flag} works with one process only; give --from=params:DIR with a folder that all '
                f'processes see, made by sinklab checkpoint import {shlex.quote(from_flag)} --out=DIR'
            )
        from_flag = hf.resolve_from_flag(from_flag, run_dir)
    parent = None
    if from_flag:
        takes, parent_dir, step = resolve_parent(from_flag, run_dir)
        if parent_dir.has_run():
            parent = WarmStart(parent_dir, step, read_spec(parent_dir), takes)
    spec, row, changes = load_requested_spec(args, extra_args, run_dir, parent)
    layout_flags.set_fast_compile_flags(row['size'])
    layout_flags.set_compilation_cache(args.compiled)
    return RunRequest(
        run_dir=run_dir,
        parent=parent,
        spec=spec,
        row=row,
        descriptions=[*filter(None, [changes])],
        layout=layout,
        profile_steps=parse_profile_steps(args.profile, run_dir, spec.optimizer.steps),
    )


def load_requested_spec(
    args: argparse.Namespace, extra_args: list[str], run_dir: RunDir, parent: Any
) -> tuple[Spec, dict, str | None]:
    """Load the requested spec, from a config file or from the parent run of a warm start.

    Returns:
        The spec, the content of row.json, and a line about the fields that the row changes, or None.

    Raises:
        UserError: Neither --config nor --from is given, or the config is invalid.
    """
    if args.config:
        file, _ = config_flags.split_config_path(args.config)
        module = config_flags.load_config_module(file)
        spec, row = config_flags.load_spec(args.config, extra_args, args.size, module)
        return spec, row, config_flags.describe_changes(module, spec, row['size'])
    if not args.from_flag:
        raise UserError(
            'neither --config nor --from is given; give --config=FILE[:ROW], such as configs/quickstart.py:softmax'
        )
    if args.size:
        raise UserError(
            f'--size={args.size} is for a row of --config; remove it: a warm start keeps the size of its run'
        )
    source_dir = parent.run_dir if parent else run_dir
    return *config_flags.load_run_config(source_dir, make_absolute(run_dir.path).name, extra_args), None


def resolve_parent(from_flag: str, child_dir: RunDir) -> tuple[Any, RunDir, int]:
    """Resolve --from=[TAKES:]RUN[@STEP] to what is taken, the parent run, and the step of its checkpoint.

    A prefix before the first colon counts as TAKES only if it is a known value, because a path may contain a colon.
    Without a step it is the newest one, or that in row.json of a warm start that exists already.

    Raises:
        UserError: The parent is no run, is the child itself, or lacks the step; or the child is another run.
    """
    takes, _, run = from_flag.partition(':')
    if takes not in filter(None, get_args(WarmStartTakes)):
        takes = ''
        run = from_flag
    if not run:
        raise UserError(f'--from={from_flag} names no run; give {format_run_ref(f"--from={takes}", "RUN", "STEP")}')
    parent_dir, step = parse_run_ref(run)
    if resolve_path(parent_dir.path) == resolve_path(child_dir.path):
        raise UserError(f'--from={from_flag} is also the --workdir; give a new folder')
    if not child_dir.has_run():
        return takes, parent_dir, digests.select_checkpoint(parent_dir, step)
    recorded = child_dir.read_parent()
    if not recorded:
        raise UserError(
            f'{child_dir} contains a run that is no warm start; give a new folder, or remove --from to continue it'
        )
    if step is None:
        step = recorded['step']
    recorded_ref = format_run_ref(
        recorded.get('takes', ''), join_path(child_dir.path, recorded['run']), recorded['step']
    )
    if format_run_ref(takes, resolve_path(parent_dir.path), step) != recorded_ref:
        raise UserError(
            f'{child_dir} contains a warm start of another checkpoint than --from={from_flag}; give '
            f'{shlex.quote(f"--from={recorded_ref}")}, or a new folder'
        )
    return takes, parent_dir, step


def make_callbacks(args: argparse.Namespace, request: RunRequest) -> list[Callback]:
    """Make the callbacks of the training loop: progress, TensorBoard, Weights & Biases."""
    name = request.row['row'] or request.row['config']
    descriptions = [*request.descriptions, describe_size(request.spec)]
    callbacks: list[Callback] = [ProgressCallback(name, request.spec.optimizer.steps, descriptions)]
    if args.tensorboard:
        callbacks.append(TensorBoardCallback(request.run_dir))
    if args.wandb:
        callbacks.append(WandbCallback(request.run_dir))
    return callbacks


def describe_size(spec: Spec) -> str:
    """Describe the number of parameters, with and without embedding and head, and the tokens of a step."""
    from sinklab.train import state

    sizes = {name: leaf.size for name, leaf in state.flatten_by_name(state.make_abstract_model(spec)[1]).items()}
    inner = sum(size for name, size in sizes.items() if not name.startswith(('embedding_VD', 'head_VD')))
    tokens = spec.optimizer.batch_size * spec.data.length
    return f'{sum(sizes.values()):,} parameters ({inner:,} without embeddings), {tokens:,} tokens per step'


def collect_shared_settings(spec: Any, layout: Any, parent: Any) -> dict[str, Any]:
    """Collect the settings that must be equal on all processes: versions, layout, config, and the step of --from.

    The path of a token store is left out, because it may differ between processes; the digest of the store is
    compared instead.
    """
    from sinklab.environment import describe_code

    config = flatten_dict(dataclasses.asdict(spec), 'config')
    if spec.data.source.startswith('store:'):
        del config['config.data.source']
    settings = describe_code() | flatten_dict(dataclasses.asdict(layout), 'layout') | config
    return settings | {'--from': parent and [parent.takes, parent.step]}


def print_results(run_dir: RunDir, row: dict, records: list[dict], options: list[str]) -> None:
    """Print the results of a finished run: a table with a line for each metric, and the next command."""
    name = row['row'] or row['config']
    console = terminal.make_console(width=100)
    headings, rows = summary_table.make_metric_table(records, row.get('published') or {})
    console.print(f'{name}: done, {records[-1]["step"]} steps in {records[-1]["seconds"]:.0f} s', soft_wrap=True)
    terminal.print_table(console, headings, rows, left_columns=['what it is'], wrap_columns=['what it is'])
    if published := summary_table.describe_published(row, headings):
        terminal.print_wrapped(published)
    emergence = summary_table.describe_emergence(records)
    terminal.print_wrapped(f'Sink_1 {emergence}; run: {run_dir}')
    print(f'For a report with plots: {shlex.join(["sinklab", "report", str(run_dir), *options])}')
