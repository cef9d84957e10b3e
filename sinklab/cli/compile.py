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
from typing import Any

from sinklab.chip_specs import BYTES_PER_GIB
from sinklab.cli import config_flags, hardware_flags
from sinklab.errors import UserError

NUM_COMPILED_LAYOUTS = 3  # layouts that --fit compiles


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        '--config',
        metavar='FILE[:ROW]',
        required=True,
        help='config file, and a row of it, such as configs/scale.py:softmax_1b',
    )
    config_flags.add_size_argument(parser)
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
    from sinklab.planning.compile_run import compile_run, make_report
    from sinklab.planning.topology import parse_topology

    spec, row = config_flags.load_spec(args.config, extra_args, args.size)
    chip_name, chips = parse_topology(args.topology)
    target, layout = (chips, CHIPS[chip_name]), hardware_flags.parse_hardware(args)
    if args.fit and args.programs:
        raise UserError('--fit compiles only the step; remove --programs')

    def compile_layout(layout: Any, program_names: list[str]) -> dict:
        print_line = functools.partial(print, file=sys.stderr, flush=True)
        return make_report(spec, compile_run(spec, layout, *target, program_names, print_line=print_line))

    title = dict(row=row['row'] or row['config'], topology=args.topology)
    if args.fit:
        report = title | compile_best_layouts(spec, layout, target, compile_layout)
        fits = bool(report['best'])
    else:
        report = title | compile_layout(layout, args.programs.split(',') if args.programs else [])
        fits = report['fits']
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        for layout_report in report['best'] if args.fit else [report]:
            print_compiled_programs(layout_report)
        if args.fit:
            print(f'{title["row"]} on {title["topology"]}: {len(report["refused"])} layouts are refused')
    return 0 if fits else 1


def compile_best_layouts(spec: Any, layout: Any, target: tuple, compile_layout: Any) -> dict[str, list[dict]]:
    """Rank all layouts by formula, and compile the best NUM_COMPILED_LAYOUTS that fit.

    Returns:
        The reports of the compiled layouts (`best`), and the layouts that do not fit (`refused`).

    Raises:
        UserError: No layout fits by formula.
    """
    from sinklab.planning import layout_search
    from sinklab.planning.compile_run import get_platform
    from sinklab.train.step import choose_unverified_backend

    backend = choose_unverified_backend(spec, layout, get_platform(target[0])).backend
    candidates, rejected = layout_search.rank_layouts(spec, layout, *target, backend)
    if not candidates:
        nearest = min(rejected, key=lambda candidate: candidate.bytes or math.inf)
        options = ' '.join(hardware_flags.format_hardware_flags(nearest.hardware))
        raise UserError(
            f'none of {len(rejected)} layouts has enough memory for this run: {options} is refused '
            f'({nearest.refused}); give more chips'
        )
    best = []
    for candidate in candidates:
        try:
            best.append(describe_candidate(candidate) | compile_layout(candidate.hardware, ['step']))
        except UserError as error:  # the formula underestimated the memory
            rejected.append(dataclasses.replace(candidate, refused=str(error)))
        if len(best) == NUM_COMPILED_LAYOUTS:
            break
    return dict(best=best, refused=[describe_candidate(candidate) for candidate in rejected])


def describe_candidate(candidate: Any) -> dict:
    fields = dict(
        options=hardware_flags.format_hardware_flags(candidate.hardware),
        formula_bytes=candidate.bytes,
        formula_seconds=candidate.seconds,
    )
    return fields | (dict(refused=candidate.refused) if candidate.refused else {})


def print_compiled_programs(report: dict) -> None:
    from sinklab.cli import terminal

    console = terminal.make_console(width=140)
    title = ' '.join(report['options']) if 'options' in report else f'{report["row"]} on {report["topology"]}'
    axis_links = {axis: f' across {link}' for axis, link in report['crosses'].items()}
    sizes = ' x '.join(f'{axis} {size}{axis_links.get(axis, "")}' for axis, size in report['mesh'].items())
    console.print(f'{title}: {sizes}, attention {report["attention"]}, remat {report["remat"]}')
    memory_bytes, rows = report['memory_bytes_per_chip'], []
    for name, program in report['programs'].items():
        peak_bytes = program['bytes']['peak']
        sent_bytes = sum(collective['sent'] for collective in program['collectives'])
        share = f'{peak_bytes / memory_bytes:.0%} of {memory_bytes / BYTES_PER_GIB:.2f}'
        sizes = [f'{peak_bytes / BYTES_PER_GIB:.2f}', share, f'{sent_bytes / 1e6:.0f}']
        rows.append([name, *sizes, f'{program["seconds"]:.0f} s'])
    headings = 'program', 'GiB per chip', 'of', 'MB sent', 'compiled in'
    terminal.print_table(console, headings, rows, left_columns=headings)
    if step_estimate := report['estimate']:
        console.print(
            f'estimated, not measured: a step needs at least {1e3 * step_estimate["seconds"]:.0f} ms, MFU at most '
            f'{step_estimate["mfu"]:.0%}; largest other cost: {step_estimate["limit"]}'
        )
    if not (step := report['programs'].get('step')):
        return
    rows = []
    for entry in sorted(step['collectives'], key=lambda collective: -collective['sent'])[:16]:
        is_overlapped = 'yes' if entry['asynchronous'] else 'no'
        types = ' '.join(entry['types'][:3]) + (' ...' if len(entry['types']) > 3 else '')
        sizes = [str(entry['times']), f'{entry["sent"] / 1e6:.0f}', is_overlapped]
        rows.append([entry['kind'], entry['axis'], *sizes, types])
    headings = 'collectives of the step', 'axis', 'times', 'MB sent', 'overlapped', 'of'
    terminal.print_table(console, headings, rows, left_columns=headings, wrap_columns=['of'])
    rows = [[entry['type'], f'{entry["bytes"] / 1e6:.0f}', entry['origin'][-60:]] for entry in step['buffers']]
    headings = 'largest arrays of the step', 'MB', 'of'
    terminal.print_table(console, headings, rows, left_columns=headings, wrap_columns=['of'])
