"""Run folders with random metrics."""

import json

import numpy as np

from sinklab.metrics.registry import FIGURES
from sinklab.run_dir import RunDir

SIZES = dict(L=3, P=5, H=2, J=3, T=8, S=8) | {'2': 2}


def write_run(
    path, row, steps=(0, 10, 20), seed=0, published=None, outcome='done', probes=True, extra_metrics=None, **config
):
    """Write a run folder of a row.

    Args:
        extra_metrics: additional metrics of each record.
        **config: fields of the config, with __ for the dot.
    """
    path.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    write_json(
        path / 'config.json',
        nest_fields(dict(seed=seed, data__seed=seed) | {'optimizer__steps': steps[-1], **config}),
    )
    write_json(path / 'row.json', dict(row=row, diff={} if row == 'softmax' else {'x': 1}, published=published or {}))
    if outcome != 'unfinished':
        message = 'train/loss is nan' if outcome == 'diverged' else ''
        write_json(
            path / 'outcome.json', dict(kind=outcome, step=steps[-1], checkpoint=None, message=message, exit_code=0)
        )
    with (path / 'metrics.jsonl').open('w') as file:
        for step in steps:
            file.write(json.dumps(make_record(step, seed, probes) | (extra_metrics or {})) + '\n')
            if probes:
                write_probe(RunDir(path).get_probe_path(step), rng)
    return str(path)


def write_json(path, content):
    path.write_text(json.dumps(content))


def nest_fields(fields):
    tree = {}
    for name, value in fields.items():
        *path, last = name.split('__')
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    return tree


def make_record(step, seed, probes):
    record = {
        'step': step,
        'seconds': step / 2,
        'train/loss': max(2.0, 5 - step / 10),
        'valid/loss': max(2.5, 5 - step / 12),
    }
    probe_metrics = {'sink/1': min(100.0, (2.0 + seed) * step), 'alpha/1': 0.3, 'alpha/floor': 0.074, 'mass/row': 1.0}
    return record | (probe_metrics if probes else {})


def write_probe(path, rng, sizes=SIZES):
    path.parent.mkdir(exist_ok=True)
    shapes = {
        picture.array_name: [sizes[letter] for letter in picture.array_name.split('_')[1]] for picture in FIGURES
    }
    arrays = {name: rng.random(shape, np.float32) for name, shape in shapes.items()}
    arrays['attention_LHTS'] = np.tril(arrays['attention_LHTS']).astype(np.float16)
    np.savez(path, **arrays)
