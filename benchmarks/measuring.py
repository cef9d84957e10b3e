"""What measuring costs beside the forward pass that it looks at: GPT-2 of 124M random parameters, 100 x 64 tokens.

python benchmarks/measuring.py [--rounds=5] [--sequences=100] [--length=64] [--layers=12]
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

from sinklab.observe import measuring
from sinklab.observe.open_model import OpenModel


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in dict(rounds=5, sequences=100, length=64, layers=12).items():
        parser.add_argument(f'--{name}', type=int, default=value)
    return parser.parse_args()


def bare(model: torch.nn.Module, ids_PT: np.ndarray) -> tuple:
    """transformers' own forward pass, with attentions."""
    with torch.inference_mode():
        return model(torch.as_tensor(ids_PT), output_attentions=True, use_cache=False).attentions


def seconds(run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    given = arguments()
    config = transformers.GPT2Config(n_layer=given.layers)
    ids_PT = np.random.default_rng(0).integers(config.vocab_size, size=(given.sequences, given.length))
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        transformers.GPT2LMHeadModel(config).save_pretrained(folder)
        eager = transformers.AutoModelForCausalLM.from_pretrained(Path(folder), attn_implementation='eager').eval()
        subject = OpenModel(folder)
        runs = {
            'transformers, with attentions': lambda: bare(eager, ids_PT),
            'without its head': lambda: bare(eager.transformer, ids_PT),
            'all that is measured': lambda: measuring.measured(subject, ids_PT),
        }
        for run in runs.values():
            run()
        times = {name: [] for name in runs}
        for _ in range(given.rounds):
            for name, run in runs.items():
                times[name].append(seconds(run))
    print(
        f'{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}'
    )
    print(f'transformers {transformers.__version__}, numpy {np.__version__}, {given.rounds} rounds in alternation')
    first = next(iter(times.values()))
    for name, found in times.items():
        ratios = [one / other for one, other in zip(found, first, strict=True)]
        print(f'{name:32} {statistics.median(found):7.2f} s ({min(found):.2f} to {max(found):.2f})', end='')
        print(f'  ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})')


if __name__ == '__main__':
    main()
