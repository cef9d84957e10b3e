"""Benchmark of attention on one GPU: our sigmoid and softmax kernels against cuDNN and plain XLA.

    PYTHONPATH=. python benchmarks/gpu_attention.py [--tokens=16384] [--lengths=1024,4096,16384] [--widths=64,128]
        [--rounds=20]

It needs jax with its CUDA plugin and flax. The data are random bfloat16 values of a model 2048 wide, with a causal
mask. A kernel that cannot be used or fails is named and left out. All kernels run in one process and take turns. A
figure is the median of --rounds, in TFLOP/s of the visible half of the matrix (2 T^2 K forward, 3.5 times that with
the backward pass), with its quartiles and its ratio to cuDNN. Lines with `+ sink scores` include the sink scores of
every step.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from argument_types import parse_count, parse_count_from_2, parse_counts

from sinklab.attn.backends import BACKENDS, verify_and_explain
from sinklab.attn.example_specs import make_operations
from sinklab.attn.key_attention_sums import compute_key_attention_sums
from sinklab.attn.mask import make_causal_mask
from sinklab.attn.spec import AttentionProblem, AttentionSpec
from sinklab.errors import format_error

MODEL_WIDTH = 2048  # heads x head width
SOFTMAX, SIGMOID = make_operations()['exp', 'sum'], make_operations()['sigmoid', 'none']
VARIANTS = {
    'cuDNN softmax': ('cudnn', SOFTMAX),
    'our softmax': ('gpu', SOFTMAX),
    'our sigmoid': ('gpu', SIGMOID),
    'XLA softmax': ('dense', SOFTMAX),
    'XLA sigmoid': ('dense', SIGMOID),
    'chunked sigmoid': ('chunked', SIGMOID),
}
NUM_KEYS = 4  # keys whose sink scores are computed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--tokens', type=parse_count, default=16384, help='of a batch: sequences times their length')
    parser.add_argument('--lengths', type=parse_counts, default='1024,4096,16384', metavar='N,...')
    parser.add_argument('--widths', type=parse_counts, default='64,128', metavar='N,...')
    parser.add_argument('--rounds', type=parse_count_from_2, default=20, metavar='N', help='from 2 on')
    parser.add_argument('--json', metavar='FILE', help='write all figures there too')
    args = parser.parse_args()
    if jax.default_backend() != 'gpu':
        print(f'gpu_attention: wants a GPU, and jax finds {jax.default_backend()} here', file=sys.stderr)
        return 1
    machine = jax.devices()[0].device_kind, f'jax {jax.__version__}', f'Python {platform.python_version()}'
    print(f'{", ".join(machine)}; {" ".join(sys.argv)}')
    records = []
    for width in args.widths:
        for length in args.lengths:
            records += compare_kernels(length, width, args)
    if args.json:
        with open(args.json, 'w') as file:
            json.dump(records, file, indent=2)
    return 0


def compare_kernels(length: int, head_width: int, args: argparse.Namespace) -> list[dict]:
    shape = max(args.tokens // length, 1), length, MODEL_WIDTH // head_width, head_width
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for _ in range(4)]
    records = []
    for direction in ('forward', 'forward and backward'):
        runs = dict(compile_variants(direction, arrays, length, head_width))
        seconds = time_in_turns(runs, arrays, args.rounds)
        flops = 2 * shape[0] * shape[2] * length**2 * head_width * (3.5 if direction.endswith('backward') else 1)
        cudnn = statistics.median(seconds['cuDNN softmax']) if 'cuDNN softmax' in seconds else None
        for name, times in seconds.items():
            low, middle, high = statistics.quantiles(times, n=4)
            ratio = cudnn and cudnn / middle
            record = dict(
                name=name, direction=direction, length=length, width=head_width, seconds=times, over_cudnn=ratio
            )
            records.append(record)
            speed = ' '.join(f'{flops / second / 1e12:6.0f}' for second in (middle, high, low))
            ratio_text = f'{ratio:6.2f} x cuDNN' if ratio else ''
            print(f'T={length:6} K={head_width:4} {direction:21} {name:26} {speed} TFLOP/s {ratio_text}', flush=True)
    return records


def compile_variants(direction: str, arrays: list[jax.Array], length: int, head_width: int):
    """Yield the name and the function of every variant that compiles and runs."""
    for name, (backend, operation) in VARIANTS.items():
        spec = AttentionSpec(operation, make_causal_mask(length))
        if reason := verify_and_explain(
            backend, 'gpu', AttentionProblem(spec, MODEL_WIDTH // head_width, head_width, head_width, 'bfloat16')
        ):
            print(f'T={length:6} K={head_width:4} {direction:21} {name:26} left out: {reason}')
            continue
        for with_sinks in (False, True) if backend != 'dense' else (False,):
            function = jax.jit(make_function(direction, backend, spec, with_sinks))
            try:
                jax.block_until_ready(function(*arrays))
            except Exception as error:  # for example, the dense matrix of 16k tokens does not fit
                print(
                    f'T={length:6} K={head_width:4} {direction:21} '
                    f'{name:26} left out: {format_error(error, max_length=90)}'
                )
                continue
            yield name + with_sinks * ' + sink scores', function


def make_function(direction: str, backend: str, spec: AttentionSpec, with_sinks: bool) -> Callable:

    def forward(query, key, value, cotangent):
        output, rows, _ = BACKENDS[backend].attend(query, key, value, spec, needs_abs_weight_sum=with_sinks)
        return output, compute_key_attention_sums(query, key, rows, spec, NUM_KEYS).share_BHS if with_sinks else 0.0

    def forward_and_backward(query, key, value, cotangent):
        def compute_weighted_sum(query, key, value):
            output, scores = forward(query, key, value, cotangent)
            return jnp.sum(output.astype(jnp.float32) * cotangent.astype(jnp.float32)), scores

        return jax.grad(compute_weighted_sum, (0, 1, 2), has_aux=True)(query, key, value)

    return forward if direction == 'forward' else forward_and_backward


def time_in_turns(runs: dict[str, Callable], arrays: list[jax.Array], rounds: int) -> dict[str, list[float]]:
    """Return seconds per call, over ten calls at a time so that launch overhead does not count."""
    seconds = {name: [] for name in runs}
    for _ in range(rounds):
        for name, function in runs.items():
            start = time.perf_counter()
            for _ in range(10):
                result = function(*arrays)
            jax.block_until_ready(result)
            seconds[name].append((time.perf_counter() - start) / 10)
    return seconds


if __name__ == '__main__':
    sys.exit(main())
