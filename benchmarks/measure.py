"""Benchmark of `sinklab measure` against the forward pass of transformers.

python benchmarks/measure.py [--rounds=5] [--sequences=100] [--length=64] [--layers=12]
python benchmarks/measure.py --model=hf:PATH_OR_ID [--rounds=5] [--sequences=100] [--length=64]

Without --model it is GPT-2 with random parameters. Token ids are random.
"""

import argparse
import statistics
import tempfile

import numpy as np
import torch
import transformers
from argument_types import parse_count
from timing import format_spread, time_call

from sinklab.analysis import measure
from sinklab.analysis.model_ref import open_model
from sinklab.machine import get_processor_name


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in dict(rounds=5, sequences=100, length=64, layers=12).items():
        parser.add_argument(f'--{name}', type=parse_count, default=value)
    parser.add_argument('--model', default='', metavar='hf:PATH_OR_ID', help='an open model (default: random GPT-2)')
    return parser.parse_args()


def make_random_gpt2(folder: str, layers: int) -> str:
    """Write GPT-2 with random parameters into a folder; return its reference."""
    torch.manual_seed(0)
    transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=layers)).save_pretrained(folder)
    return f'hf:{folder}'


def run_forward(model: torch.nn.Module, ids_PT: np.ndarray) -> tuple:
    """Run the forward pass of transformers and return its attentions."""
    with torch.inference_mode():
        return model(torch.as_tensor(ids_PT), output_attentions=True, use_cache=False).attentions


def main() -> None:
    args = parse_arguments()
    with tempfile.TemporaryDirectory() as folder:
        hf_model = open_model(args.model or make_random_gpt2(folder, args.layers))
        ids_PT = np.random.default_rng(0).integers(hf_model.vocabulary, size=(args.sequences, args.length))
        eager_model = transformers.AutoModelForCausalLM.from_pretrained(
            hf_model.model_dir, attn_implementation='eager', dtype=torch.float32
        ).eval()
        runs = {
            'transformers, with attentions': lambda: run_forward(eager_model, ids_PT),
            'transformers, without the head': lambda: run_forward(eager_model.base_model, ids_PT),
            'sinklab measure': lambda: measure.measure_model(hf_model, ids_PT),
        }
        for run in runs.values():
            run()
        times = {name: [] for name in runs}
        for _ in range(args.rounds):
            for name, run in runs.items():
                times[name].append(time_call(run))
    print(f'{get_processor_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}')
    print(f'transformers {transformers.__version__}, numpy {np.__version__}, {args.rounds} rounds in alternation')
    baseline_times = next(iter(times.values()))
    for name, run_times in times.items():
        ratios = [elapsed / baseline for elapsed, baseline in zip(run_times, baseline_times, strict=True)]
        print(
            f'{name:32} {statistics.median(run_times):7.2f} s ({min(run_times):.2f} to {max(run_times):.2f})', end=''
        )
        print(f'  ratio {format_spread(ratios)}')


if __name__ == '__main__':
    main()
