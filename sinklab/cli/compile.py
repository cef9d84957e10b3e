"""Compile a run for TPUs or GPUs that this machine lacks, and estimate the memory that it needs.

Nothing is trained.

example:
  sinklab compile --config=configs/scale.py:softmax_1b --topology=v5e:16x16 --remat=auto
"""

import argparse
import dataclasses
import functools
import json
import math
import sys
from collections.abc import Sequence
from typing import Any

from sinklab.chip_specs import BYTES_PER_GIB
from sinklab.cli import config_flags, hardware_flags
from sinklab.cli.train import add_size_argument
from sinklab.config.spec import Hardware, Spec
from sinklab.errors import UserError

NUM_COMPILED_LAYOUTS = 3  # layouts that --fit compiles


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        '--config',
        metavar='FILE[:ROW]',
        required=True,
        help='config file, and a row of it, such as configs/scale.py:softmax_1b',
    )
    add_size_argument(parser)
    parser.add_argument(
        '--topology',
        metavar='CHIP:SHAPE',
        required=True,
        help='kind and number of chips: v5e:16x16, v5p:4x4x4, 2xv5e:8x8 (two slices), h100:8 and others',
    )
    hardware_flags.add_arguments(parser)
    parser.add_argument(
        '--programs',
        metavar='NAMES',
        help='only some of the programs state, validation, probe, step (default: all of them)',
    )
    parser.add_argument(
        '--fit',
        action='store_true',
        help='rank layouts (--data, --fsdp, --tensor, --micro_batch) by formula, and compile the best three',
    )
    parser.add_argument('--json', action='store_true', help='print the result as JSON')


def run(args: argparse.Namespace, extra_args: list[str]) -> int:
    from sinklab.chip_specs import CHIPS
    from sinklab.planning.topology import parse_topology

    spec, row = config_flags.load_spec(args.config, extra_args, args.size)
    chip_name, chips = parse_topology(args.topology)
    target = chips, CHIPS[chip_name]
    title = row['row'] or row['config']
    if args.fit and args.programs:
        raise UserError('--fit compiles only the step; remove --programs')
    if args.fit:
        return compile_best_layouts(
            spec, hardware_flags.parse_hardware(args), target, dict(row=title, topology=args.topology), args.json
        )
    report = compile_layout(
        spec, hardware_flags.parse_hardware(args), target, args.programs.split(',') if args.programs else ()
    )
    if args.json:
        print(json.dumps(dict(row=title, topology=args.topology, **report), indent=2))
    else:
        print_compiled_programs(f'{title} on {args.topology}', report)
    return 0 if report['fits'] else 1


def compile_layout(spec: Spec, layout: Hardware, target: tuple, program_names: Sequence[str] = ()) -> dict:
    from sinklab.planning.compile_run import compile_run, make_report

    return make_report(
        spec,
        compile_run(
            spec, layout, *target, program_names, print_line=functools.partial(print, file=sys.stderr, flush=True)
        ),
    )


def compile_best_layouts(spec: Spec, layout: Hardware, target: tuple, row_info: dict, as_json: bool) -> int:
    """Rank all layouts by formula, compile the best NUM_COMPILED_LAYOUTS that fit, and print them.

    Returns:
        The exit code: 0 if a compiled layout fits, otherwise 1.

    Raises:
        UserError: No layout fits by formula.
    """
    from sinklab.planning import layout_search
    from sinklab.planning.compile_run import get_platform
    from sinklab.train.step import choose_unverified_backend

    candidates, rejected = layout_search.rank_layouts(
        spec, layout, *target, choose_unverified_backend(spec, layout, get_platform(target[0])).backend
    )
    if not candidates:
        raise UserError(
            f'none of {len(rejected)} layouts has enough memory for this '
            f'run: {format_nearest_layout(rejected)}; give more chips'
        )
    reports = []
    for candidate in candidates:
        try:
            reports.append(describe_candidate(candidate) | compile_layout(spec, candidate.hardware, target, ['step']))
        except UserError as error:  # the formula underestimated the memory
            rejected.append(dataclasses.replace(candidate, refused=str(error)))
        if len(reports) == NUM_COMPILED_LAYOUTS:
            break
    if as_json:
        print(
            json.dumps(
                row_info | dict(best=reports, refused=[describe_candidate(candidate) for candidate in rejected]),
                indent=2,
            )
        )
        return 0 if reports else 1
    for candidate in reports:
        print_compiled_programs(' '.join(candidate['options']), candidate)
    suffix = f'; {format_nearest_layout(rejected)}' if rejected else ''
    print(
        f'{row_info["row"]} on {row_info["topology"]}: {len(candidates)} '
        f'layouts fit by formula, {len(rejected)} are refused{suffix}'
    )
    return 0 if reports else 1


def format_nearest_layout(rejected: list) -> str:
    """Format the rejected layout that needs the least memory, with the reason of its rejection."""
    candidate = min(rejected, key=lambda candidate: candidate.bytes or math.inf)
    return f'{" ".join(hardware_flags.format_hardware_flags(candidate.hardware))} is refused ({candidate.refused})'


def describe_candidate(candidate: Any) -> dict:
    fields = dict(
        options=hardware_flags.format_hardware_flags(candidate.hardware),
        formula_bytes=candidate.bytes,
        formula_seconds=candidate.seconds,
    )
    return fields | (dict(refused=candidate.refused) if candidate.refused else {})


def print_compiled_programs(title: str, report: dict) -> None:
    from sinklab.cli import terminal

    console = terminal.make_console(width=140)
    axis_links = {axis: f' across {link}' for axis, link in report['crosses'].items()}
    sizes = ' x '.join(f'{axis} {size}{axis_links.get(axis, "")}' for axis, size in report['mesh'].items())
    console.print(f'{title}: {sizes}, attention {report["attention"]}, remat {report["remat"]}')
    rows = []
    for name, program in report['programs'].items():
        peak_bytes, sent_bytes = (
            program['bytes']['peak'],
            sum(collective['sent'] for collective in program['collectives']),
        )
        memory_bytes = report['memory_bytes_per_chip']
        memory_share = f'{peak_bytes / memory_bytes:.0%} of {memory_bytes / BYTES_PER_GIB:.2f}'
        rows.append(
            [
                name,
                f'{peak_bytes / BYTES_PER_GIB:.2f}',
                memory_share,
                f'{sent_bytes / 1e6:.0f}',
                f'{program["seconds"]:.0f} s',
            ]
        )
    headings = 'program', 'GiB per chip', 'of', 'MB sent', 'compiled in'
    terminal.print_table(console, headings, rows, left_columns=headings)
    if step_estimate := report['estimate']:
        console.print(
            f'estimated, not measured: a step needs at least {1e3 * step_estimate["seconds"]:.0f} ms, MFU at most '
            f'{step_estimate["mfu"]:.0%}; largest other cost: {step_estimate["limit"]}'
        )
    if step := report['programs'].get('step'):
        print_step_details(console, step)


def print_step_details(console: Any, step: dict) -> None:
    from sinklab.cli import terminal

    rows = []
    for entry in sorted(step['collectives'], key=lambda collective: -collective['sent'])[:16]:
        is_overlapped = 'yes' if entry['asynchronous'] else 'no'
        types = ' '.join(entry['types'][:3]) + (' ...' if len(entry['types']) > 3 else '')
        rows.append(
            [entry['kind'], entry['axis'], str(entry['times']), f'{entry["sent"] / 1e6:.0f}', is_overlapped, types]
        )
    headings = 'collectives of the step', 'axis', 'times', 'MB sent', 'overlapped', 'of'
    terminal.print_table(console, headings, rows, left_columns=headings, wrap_columns=['of'])
    rows = [[entry['type'], f'{entry["bytes"] / 1e6:.0f}', entry['origin'][-60:]] for entry in step['buffers']]
    headings = 'largest arrays of the step', 'MB', 'of'
    terminal.print_table(console, headings, rows, left_columns=headings, wrap_columns=['of'])
