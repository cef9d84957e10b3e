"""Benchmark of `sinklab measure` against the forward pass of transformers.

python benchmarks/measure.py [--rounds=5] [--sequences=100] [--length=64] [--layers=12]
"""

import argparse
import platform
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import transformers

from sinklab.analysis import measure
from sinklab.analysis.hf_model import HFModel


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in dict(rounds=5, sequences=100, length=64, layers=12).items():
        parser.add_argument(f'--{name}', type=int, default=value)
    return parser.parse_args()


def run_forward(model: torch.nn.Module, ids_PT: np.ndarray) -> tuple:
    """Run the forward pass of transformers and return its attentions."""
    with torch.inference_mode():
        return model(torch.as_tensor(ids_PT), output_attentions=True, use_cache=False).attentions


def time_call(run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    args = parse_arguments()
    config = transformers.GPT2Config(n_layer=args.layers)
    ids_PT = np.random.default_rng(0).integers(config.vocab_size, size=(args.sequences, args.length))
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        transformers.GPT2LMHeadModel(config).save_pretrained(folder)
        eager_model = transformers.AutoModelForCausalLM.from_pretrained(
            Path(folder), attn_implementation='eager'
        ).eval()
        hf_model = HFModel(folder)
        runs = {
            'transformers, with attentions': lambda: run_forward(eager_model, ids_PT),
            'without its head': lambda: run_forward(eager_model.transformer, ids_PT),
            'all that is measured': lambda: measure.measure_model(hf_model, ids_PT),
        }
        for run in runs.values():
            run()
        times = {name: [] for name in runs}
        for _ in range(args.rounds):
            for name, run in runs.items():
                times[name].append(time_call(run))
    print(
        f'{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}'
    )
    print(f'transformers {transformers.__version__}, numpy {np.__version__}, {args.rounds} rounds in alternation')
    baseline_times = next(iter(times.values()))
    for name, run_times in times.items():
        ratios = [elapsed / baseline for elapsed, baseline in zip(run_times, baseline_times, strict=True)]
        print(
            f'{name:32} {statistics.median(run_times):7.2f} s ({min(run_times):.2f} to {max(run_times):.2f})', end=''
        )
        print(f'  ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})')


if __name__ == '__main__':
    main()
