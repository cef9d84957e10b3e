"""Measure pretrained models in the experiments of configs/open_models.py, and write docs/results/open_models.md.

    python -m benchmarks.corpora build/corpora
    python -m benchmarks.open_models --corpora=build/corpora
    python -m benchmarks.open_models --corpora=build/corpora --models=NAME=hf:PATH --out=mine.json --sequences=20
    python -m benchmarks.open_models --experiments=streaming
    python -m benchmarks.open_models --page

Results are written into the JSON file after each experiment, in place of earlier ones of that experiment and model.
With the default file, the tables of the page and its pictures are written at the end (docs/open_model_results.py);
--page writes them alone.
"""

import argparse
import contextlib
import dataclasses
import functools
import io
import json
import os
import platform
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import sinklab
from benchmarks.argument_types import parse_count
from benchmarks.machine import get_processor_name
from docs import open_model_results, page_parts
from sinklab.analysis.measure import OPEN_MODEL_DEFAULTS, MeasureRequest, MeasureResult, make_job
from sinklab.api import OpenedModel
from sinklab.cli.main import main as run_sinklab
from sinklab.configs.open_models import EXPERIMENTS, MODELS
from sinklab.environment import get_package_versions
from sinklab.errors import UserError, format_error
from sinklab.storage.files import atomic_write

SIGNIFICANT_DIGITS = 6
PACKAGES = 'torch', 'transformers', 'jax', 'numpy', 'gguf'
REQUEST_FIELDS = {field.name for field in dataclasses.fields(MeasureRequest)}


@dataclasses.dataclass(frozen=True)
class ModelEntry:
    """A model on the command line: its display name and its reference for `sinklab.open`."""

    name: str
    ref: str

    @property
    def source(self) -> str:
        """Where the model comes from, without a path of this machine."""
        entry = MODELS.get(self.name)
        if entry is None:
            return Path(self.ref.partition(':')[2]).name
        first, *others = entry['packages']
        return f'{entry["file"]} of {first}' + (f' and {len(others)} more packages' if others else '')


@functools.lru_cache(maxsize=1)
def open_model(ref: str, bos: str = 'auto') -> OpenedModel:
    return sinklab.open(ref, bos=bos)


def round_number(value: float) -> float | None:
    """Round to SIGNIFICANT_DIGITS; None for nan and infinities, which JSON does not have."""
    return float(f'{value:.{SIGNIFICANT_DIGITS}g}') if np.isfinite(value) else None


def round_list(values: Any) -> list[float | None]:
    return [round_number(float(value)) for value in values]


def select_numbers(numbers: dict[str, float], metrics: tuple[str, ...]) -> dict[str, Any]:
    """Return the numbers of metrics; for a metric that ends in *, the list over layers."""
    selected: dict[str, Any] = {}
    for metric in metrics:
        values: list[float | None] | float | None
        if metric.endswith('*'):
            names = sorted(name for name in numbers if name.startswith(metric[:-1]))
            values = round_list(numbers[name] for name in names)
        else:
            values = round_number(numbers[metric]) if metric in numbers else None
        if values not in (None, []):
            selected[metric] = values
    return selected


def reduce_array(name: str, array: np.ndarray) -> dict[str, list[float | None]]:
    """Return for each layer the value of the first token, and the mean of the other tokens.

    Args:
        name: The name of the array, which ends in LT (a value for each token) or in LH2 (of the first key and of the
            others, for each head).
        array: The array.
    """
    if name.endswith('_LH2'):
        first_L, others_L = np.moveaxis(array.mean(1), -1, 0)
    else:
        first_L, others_L = array[:, 0], array[:, 1:].mean(1)
    return dict(first=round_list(first_L), others=round_list(others_L))


def measure_variant(model: ModelEntry, experiment: dict, options: dict, corpora: Path) -> dict[str, Any]:
    """Return the numbers and arrays of a variant."""
    subject = open_model(model.ref, options.get('bos', 'auto')).subject
    fields = {name: value for name, value in options.items() if name in REQUEST_FIELDS}
    source = f'text:{corpora / options["domain"]}/*.txt'
    job = make_job(subject, MeasureRequest(source=source, **fields))
    if options.get('bos_first'):
        bos_id = subject.tokenizer.bos_token_id
        if bos_id is None:
            raise UserError(f'{model.name} has no BOS')
        ids_by_input = {name: ids_PT.copy() for name, ids_PT in job.ids_by_input.items()}
        for ids_PT in ids_by_input.values():
            ids_PT[:, 0] = bos_id
        job = dataclasses.replace(job, ids_by_input=ids_by_input)
    result: MeasureResult = job.run()
    (measurement,) = result.measurements.values()
    found = dict(values=select_numbers(measurement.numbers, experiment['metrics']))
    if arrays := [name for name in experiment.get('arrays', ()) if name in measurement.arrays]:
        found['layers'] = {name: reduce_array(name, measurement.arrays[name]) for name in arrays}
    return found | (dict(remarks=[*job.remarks]) if job.remarks else {})


def show_attention(model: ModelEntry, experiment: dict, options: dict, corpora: Path) -> dict[str, Any]:
    """Return the attention matrices of two heads; layers and heads count from 0.

    They are the heads with the largest and with the median alpha_1.
    """
    attention = open_model(model.ref).attention(options['text'])
    alpha_LH = attention.matrix_LHTS[..., len(attention.keys) - len(attention.queries)].mean(-1)
    order, heads = np.argsort(alpha_LH, axis=None), {}
    for name, place in (('largest', order[-1]), ('median', order[len(order) // 2])):
        index, head = (int(number) for number in np.unravel_index(place, alpha_LH.shape))
        matrix = [[round(float(weight), 3) for weight in row] for row in attention.matrix_LHTS[index, head]]
        heads[name] = dict(layer=attention.layers[index], head=head, matrix=matrix)
        heads[name]['alpha'] = round_number(float(alpha_LH[index, head]))
    return dict(queries=attention.queries, keys=attention.keys, heads=heads)


def stream_text(model: ModelEntry, experiment: dict, options: dict, corpora: Path) -> dict[str, Any]:
    """Return the perplexity of the beginning of the long text under a cache."""
    text = (corpora / 'long.txt').read_text(encoding='utf-8')[: options['characters']]
    with tempfile.NamedTemporaryFile('w', encoding='utf-8') as file:
        file.write(text)
        file.flush()
        (row,) = json.loads(
            run_command('stream', model.ref, f'--text={file.name}', f'--cache={options["cache"]}', '--json')
        )
    return dict(values=select_numbers(row, experiment['metrics']))


def run_command(*argv: str) -> str:
    """Run a command of sinklab in this process and return its output.

    Raises:
        UserError: The command fails; its message is the reason.
    """
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        exit_code = run_sinklab([*argv])
    if exit_code:
        message = (errors.getvalue().strip() or 'it failed').splitlines()[-1]
        raise UserError(message.partition(': ')[2] or message)
    return output.getvalue()


VERBS = {'measure': measure_variant, 'stream': stream_text, 'attention': show_attention}


def complete_options(options: dict, args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of a variant with the defaults of measurements, at the size that the command line gives."""
    if 'inputs' in options:
        sequences = min(args.sequences, options.get('sequences', args.sequences))
        return dict(length=OPEN_MODEL_DEFAULTS['length'], domain='prose') | options | dict(sequences=sequences)
    return options


def select_variants(experiment: dict, position: str, args: argparse.Namespace) -> dict[str, dict]:
    """Return the completed options of the variants that apply to a model, those with the same BOS together."""
    if experiment.get('position') not in (None, position):
        return {}
    variants = {name: complete_options(options, args) for name, options in experiment['variants'].items()}
    return dict(sorted(variants.items(), key=lambda item: item[1].get('bos', 'auto')))


def run_experiment(experiment: dict, model: ModelEntry, variants: dict, args: argparse.Namespace) -> dict[str, Any]:
    """Return what was found in each variant, or why the model refuses it, and how it was measured."""
    run_variant = VERBS[experiment.get('verb', 'measure')]
    start = time.perf_counter()
    found: dict[str, Any] = {}
    refused: dict[str, str] = {}
    if run_variant is stream_text:
        open_model.cache_clear()  # frees the memory of the model
    for name, options in variants.items():
        try:
            found[name] = run_variant(model, experiment, options, args.corpora)
        except UserError as error:
            refused[name] = remove_folders(format_error(error, max_length=None).replace(model.ref, model.name))
    entry = dict(
        options=variants,
        metrics=experiment['metrics'],
        arrays=experiment.get('arrays', ()),
        versions=get_package_versions(PACKAGES),
        machine=make_machine_record(),
        seconds=round(time.perf_counter() - start, 1),
        found={name: found[name] for name in experiment['variants'] if name in found},
    )
    return entry | (dict(refused=refused) if refused else {})


def remove_folders(message: str) -> str:
    """Remove the folders of absolute paths, which are those of this machine."""
    return re.sub(r'(?<![\w.])/(?:[^\s/]+/)+', '', message)


def describe_model(model: ModelEntry) -> dict[str, Any]:
    subject = open_model(model.ref).subject
    parameters = sum(parameter.numel() for parameter in subject.model.parameters())
    config = subject.config
    description = dict(source=model.source, parameters=parameters)
    description |= dict(layers=config.num_hidden_layers, heads=config.num_attention_heads, position=subject.position)
    description |= dict(dtype=subject.dtype)
    return description | (dict(remarks=[*subject.remarks]) if subject.remarks else {})


def make_machine_record() -> dict[str, Any]:
    """Return the processor, the number of cores, the version of Python and the date."""
    return dict(
        processor=get_processor_name(),
        cores=len(os.sched_getaffinity(0)),
        python=platform.python_version(),
        date=time.strftime('%Y-%m-%d'),
    )


def run_all(args: argparse.Namespace) -> None:
    """Run the experiments, and write the JSON file after each of them."""
    results = json.loads(args.out.read_text(encoding='utf-8')) if args.out.exists() else {}
    results = dict(models={}, experiments={}) | results
    for model in args.models:
        description = describe_model(model)
        results['models'][model.name] = description
        for name in args.experiments:
            experiment, entries = EXPERIMENTS[name], results['experiments'].setdefault(name, {})
            if variants := select_variants(experiment, description['position'], args):
                entries[model.name] = run_experiment(experiment, model, variants, args)
                print(f'{model.name}, {name}: {entries[model.name]["seconds"]} s', flush=True)
                with atomic_write(args.out) as unfinished:
                    unfinished.write_text(page_parts.format_json(results), encoding='utf-8')


def parse_models(text: str) -> list[ModelEntry]:
    """Parse NAME=REF,...; a NAME alone is one of MODELS, whose file is in build/models."""
    pairs = [item.partition('=')[::2] for item in text.split(',')]
    if unknown := [name for name, ref in pairs if not ref and name not in MODELS]:
        raise SystemExit(f'{unknown[0]} is not one of {", ".join(MODELS)}; give NAME=hf:PATH')
    return [ModelEntry(name, ref or f'gguf:build/models/{MODELS[name]["file"]}') for name, ref in pairs]


def parse_experiments(text: str) -> list[str]:
    names = text.split(',')
    if unknown := [name for name in names if name not in EXPERIMENTS]:
        raise SystemExit(f'{unknown[0]} is not one of {", ".join(EXPERIMENTS)}')
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--models', type=parse_models, default=','.join(MODELS), metavar='NAME=REF,...')
    parser.add_argument('--corpora', type=Path, default=Path('build/corpora'), metavar='DIR')
    parser.add_argument('--experiments', type=parse_experiments, default=','.join(EXPERIMENTS), metavar='NAME,...')
    parser.add_argument(
        '--sequences',
        type=parse_count,
        default=OPEN_MODEL_DEFAULTS['sequences'],
        metavar='N',
        help='most texts of a variant (default: %(default)s)',
    )
    parser.add_argument('--out', type=Path, default=open_model_results.RESULTS_FILE, metavar='FILE')
    parser.add_argument('--page', action='store_true', help='measure nothing, and write the page from the JSON file')
    args = parser.parse_args()
    if not args.page:
        run_all(args)
    if args.out == open_model_results.RESULTS_FILE:
        open_model_results.write_page()


if __name__ == '__main__':
    main()
