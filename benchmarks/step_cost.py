"""What a step of 1B would cost on slices of TPUs that are not here, by the compiler's text: no chip, no clock.

    python benchmarks/step_cost.py [--topologies=v5e:16x16] [--rows=softmax_1b] [--check | --write]

A line is a row of configs/scale.py on a topology, laid on it as a run would be (--remat=auto): seconds to compile,
GiB on a chip, megabytes that a chip sends by what it sends them for (weights gathered, gradients scattered, what goes
between slices), the share of weights that travels beside the computation, and an estimate of the step and of its MFU,
at most. It exits 1 where a rule below is broken; with --check, also where a figure is more than a tenth from that in
benchmarks/step_cost.json, which --write makes.
"""

import argparse
import collections
import json
import math
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

FIGURES = Path(__file__).with_suffix('.json')
TOPOLOGIES = 'v5e:16x16', 'v5p:4x4x4', '2xv5e:8x8'
ROWS = 'softmax_1b', 'sigmoid_1b'
SMALL = 2**20  # bytes; losses, norms and gains are less
OVER = 1.1  # of the least bytes that could be sent
HIDDEN = {'v5e': 0.6}  # of the bytes of gathers, that travel beside what is computed; other chips do not overlap them
COMMAND = 'python benchmarks/step_cost.py --write'
HELD = 'bytes', 'gathered', 'scattered', 'between', 'beside', 'mfu'  # what --check holds to the committed figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--topologies', default=','.join(TOPOLOGIES))
    parser.add_argument('--rows', default=','.join(ROWS))
    what = parser.add_mutually_exclusive_group()
    what.add_argument('--check', action='store_true')
    what.add_argument('--write', action='store_true')
    given = parser.parse_args()
    os.environ['JAX_PLATFORMS'] = 'cpu'
    from sinklab import topology
    from sinklab.install import format_extra_command

    if topology.library() is None:
        sys.exit(f'step_cost: libtpu, which has the compiler, is not installed; {format_extra_command("tpu")}')
    print(
        f'{"":24}{"compiled":>9}{"GiB":>6}{"gathered":>10}{"scattered":>10}{"between":>9}{"beside":>8}{"ms":>6}{"MFU":>5}'
    )
    found, code = {}, 0
    for name in given.topologies.split(','):
        for row in given.rows.split(','):
            found[f'{row} {name}'] = one = cost(row, name)
            show(f'{row} {name}', one)
            code = max(code, told(f'{row} {name}', one['broken']))
    if given.write:
        document = json.loads(FIGURES.read_text()) if FIGURES.exists() else dict(costs={})
        document = dict(command=COMMAND, libtpu=topology.version(), costs=document['costs'] | found)
        FIGURES.write_text(json.dumps(document, indent=2) + '\n')
    return max(code, moved(found) if given.check else 0)


def cost(row: str, name: str) -> dict:
    from configs import scale
    from sinklab.chips import CHIPS
    from sinklab.parse import parse
    from sinklab.spec import Hardware
    from sinklab.topology import described
    from sinklab.train import memory
    from sinklab.train.estimate import estimate
    from sinklab.train.preview import preview

    spec, (kind, chips) = parse(scale.get_config(row).to_dict()), described(name)
    one = preview(spec, Hardware(remat='auto', attention='tpu'), chips, CHIPS[kind], ['step'])
    mesh, step = one.mesh, one.programs['step']
    bound = estimate(spec, one.hardware, step, mesh, one.chip)
    sent = by_purpose(step.program.collectives(), mesh)
    shapes = memory.held(spec, one.hardware, mesh, one.backend).total
    return dict(
        mesh=dict(mesh.shape),
        remat=one.hardware.remat,
        compiled=round(step.seconds),
        bytes=step.bytes['peak'],
        by_shapes=shapes,
        **{
            purpose: round(sum(one.sent for one in sent[purpose])) for purpose in ('gathered', 'scattered', 'between')
        },
        beside=round(beside(sent['gathered']), 3),
        milliseconds=round(1e3 * bound.seconds),
        mfu=round(bound.mfu, 3),
        limit=bound.limit,
        broken=broken(spec, one, shapes, sent, HIDDEN.get(kind)),
    )


def by_purpose(collectives: list, mesh) -> dict[str, list]:
    """Collectives of more than a few numbers, by what they are for."""
    from sinklab.train.estimate import crossed

    purposes = {
        ('all-gather', 'fsdp'): 'gathered',
        ('reduce-scatter', 'fsdp'): 'scattered',
        ('collective-permute', 'fsdp'): 'scattered',  # what the compiler makes of some
        ('all-reduce', 'data'): 'between',
    }
    found = collections.defaultdict(list)
    for one in collectives:
        if one.bytes >= SMALL:
            found[purposes.get((one.kind, crossed(one, mesh)), 'others')].append(one)
    return found


def beside(gathers: list) -> float:
    """The share of the bytes of gathers that travels while something is computed."""
    return sum(one.sent for one in gathers if one.asynchronous) / max(1, sum(one.sent for one in gathers))


def broken(spec, one, shapes: int, sent: dict[str, list], hidden: float | None) -> list[str]:
    """The rules that a step does not keep, of so many bytes by shapes; so much of its gathers is to be hidden."""
    from sinklab.train import state

    matrices = [leaf for leaf in tree(state.shapes(spec)['params']) if leaf.ndim > 2 or leaf.size > SMALL]
    size, (data, fsdp) = 4 * sum(leaf.size for leaf in matrices), (one.mesh.shape['data'], one.mesh.shape['fsdp'])
    scattered, between = (sum(each.sent for each in sent[purpose]) for purpose in ('scattered', 'between'))
    stacked = {merged for leaf in matrices if leaf.ndim > 2 for merged in merges(leaf.shape)}
    rules = {
        'it fits': one.peak <= one.memory,
        'shapes say no less than it takes': shapes >= one.peak,
        'gathers travel beside what is computed': hidden is None or beside(sent['gathered']) >= hidden,
        'weights are gathered in bfloat16': all(
            kind.startswith('bf16') for each in sent['gathered'] for kind in each.types
        ),
        'nothing else of size travels': not sent['others'],
        f'gradients are scattered, with {OVER} of the least bytes': scattered <= OVER * size * (fsdp - 1) / fsdp,
        'all gradients are scattered': scattered >= size * (fsdp - 1) / fsdp,
        'slices add gradients once': between <= OVER * 2 * size / fsdp * (data - 1) / data,
        'no array has all layers of a parameter': not any(
            dimensions(kind) in stacked for _, kind, _ in one.programs['step'].program.buffers(10**6)
        ),
    }
    return [rule for rule, kept in rules.items() if not kept]


def tree(params: dict) -> list:
    import jax

    return jax.tree.leaves(params)


def merges(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """A shape, and as it is where two neighbours of its dimensions are one."""
    merged = [(*shape[:at], shape[at] * shape[at + 1], *shape[at + 2 :]) for at in range(1, len(shape) - 1)]
    return [shape, *(one for one in merged if len(one) > 2)]


def dimensions(kind: str) -> tuple[int, ...]:
    return tuple(int(size) for size in kind.partition('[')[2].partition(']')[0].split(',') if size)


def show(name: str, one: dict) -> None:
    sent = ''.join(
        f'{one[purpose] / 1e6:{width}.0f}' for purpose, width in dict(gathered=10, scattered=10, between=9).items()
    )
    print(
        f'{name:24}{one["compiled"]:7} s{one["bytes"] / 2**30:6.2f}{sent}{one["beside"]:8.0%}{one["milliseconds"]:6}'
        f'{one["mfu"]:5.0%}',
        flush=True,
    )


def told(name: str, words: list[str]) -> int:
    for one in words:
        print(f'{name}: broken: {one}', file=sys.stderr)
    return bool(words)


def moved(found: dict) -> int:
    """1 if a figure is more than a tenth from the committed one."""
    committed = json.loads(FIGURES.read_text())['costs']
    words = {
        name: [
            f'{key} is {one[key]}, and {committed[name][key]} is committed'
            for key in HELD
            if not math.isclose(one[key], committed[name][key], rel_tol=0.1, abs_tol=0.01)
        ]
        if name in committed
        else ['nothing is committed of it']
        for name, one in found.items()
    }
    return max(told(name, one) for name, one in words.items())


if __name__ == '__main__':
    sys.exit(main())
