"""Compile a run for TPUs or GPUs that this machine lacks, and print the memory that it needs.

Only the train step is compiled, and nothing is trained.

example:
  sinklab compile --config=configs/scale.py:softmax_1b --topology=v5e:16x16 --remat=auto
"""

import argparse
import json
import sys

from sinklab.chip_specs import BYTES_PER_GIB, CHIPS
from sinklab.cli import config_flags, layout_flags, terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        '--config',
        metavar='FILE[:ROW]',
        required=True,
        help='config file and row, such as configs/scale.py:softmax_1b',
    )
    config_flags.add_size_argument(parser)
    parser.add_argument(
        '--topology',
        metavar='CHIP:SHAPE',
        required=True,
        help='kind and number of chips: v5e:16x16, v5p:4x4x4, 2xv5e:8x8 (two slices), h100:8 and others',
    )
    layout_flags.add_arguments(parser)
    parser.add_argument('--json', action='store_true', help='print the result as JSON')


def run(args: argparse.Namespace, extra_args: list[str]) -> int:
    from sinklab.planning.compile_run import compile_run, make_report
    from sinklab.planning.topology import parse_topology

    spec, row = config_flags.load_spec(args.config, extra_args, args.size)
    chip_name, devices = parse_topology(args.topology)
    print(f'compiling a step for {len(devices)} devices, which may take minutes', file=sys.stderr, flush=True)
    compiled_step = compile_run(spec, layout_flags.parse_layout(args), devices, CHIPS[chip_name])
    report = dict(row=row['row'] or row['config'], topology=args.topology) | make_report(spec, compiled_step)
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        print_report(report)
    return 0 if report['fits'] else 1


def print_report(report: dict) -> None:
    console = terminal.make_console(width=140)
    axes = ' x '.join(f'{axis} {size}' for axis, size in report['mesh'].items())
    console.print(
        f'{report["row"]} on {report["topology"]}: {axes}, attention {report["attention"]}, remat {report["remat"]}'
    )
    peak_bytes = report['peak_bytes_per_chip']
    memory_bytes = report['memory_bytes_per_chip']
    console.print(
        f'a step needs {peak_bytes / BYTES_PER_GIB:.2f} GiB per chip, {peak_bytes / memory_bytes:.0%} of '
        f'{memory_bytes / BYTES_PER_GIB:.2f} (compiled in {report["compile_seconds"]:.0f} s)'
    )
    console.print(
        f'matrix products of a step: {report["step_flops_per_chip"] / 1e12:.3g} TFLOP per chip, which take at least '
        f'{1e3 * report["step_seconds_at_peak"]:.3g} ms at the published peak'
    )
