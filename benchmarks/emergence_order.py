"""Experiment: what comes first when a sink emerges: the direction of the first key, its value, or its hidden state.

    python -m benchmarks.switch_attention --workdir=runs/switch --seeds=3 --jobs=2
    python -m benchmarks.emergence_order runs/switch/softmax-0 runs/switch/softmax-1 runs/switch/softmax-2 --write

The script reads the probes of finished softmax runs. A sink head has a mean alpha_1 above 0.3 at the last probe. Four
quantities are followed over training:

- direction: the cosine of queries with the first key, minus the mean cosine with other keys, of each sink head;
- attention: alpha_1 of each sink head;
- hidden state: the norm of the first token's hidden state over the mean norm of others, after the block of the head;
- value: the norm of the first token's value over the mean norm of others, in the layer of the head.

The step of a quantity is that of the first probe from which on it stays beyond half of its change over the run.
--write writes docs/results/emergence_order.json and .png.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from scipy.special import bdtrc

from sinklab.metrics.sink import SINK_THRESHOLD

RESULTS = Path(__file__).resolve().parents[1] / 'docs' / 'results'
QUANTITIES = 'direction', 'attention', 'hidden state', 'value'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('runs', nargs='+', type=Path)
    parser.add_argument('--write', action='store_true')
    args = parser.parse_args()
    results = {path.name: measure_run(path) for path in args.runs}
    for name, result in results.items():
        print(f'{name}: {len(result["heads"])} sink heads; median step: {result["median"]}')
    print(compare_orders(results))
    if args.write:
        content = dict(runs=results, orders=compare_orders(results))
        (RESULTS / 'emergence_order.json').write_text(json.dumps(content, indent=1) + '\n')
        draw_curves(args.runs, RESULTS / 'emergence_order.png')


def read_quantities(path: Path) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Read the steps of all probes of a run, and its QUANTITIES as arrays of (probe, layer, head)."""
    files = sorted((path / 'probe').glob('*.npz'))
    probes = [np.load(file) for file in files]
    alpha_NLH = np.stack([get_alpha(probe) for probe in probes])
    cosine_NLH2 = np.stack([probe['cos_LH2'] for probe in probes])
    quantities = {'direction': cosine_NLH2[..., 0] - cosine_NLH2[..., 1], 'attention': alpha_NLH}
    for name, array_name in (('hidden state', 'norm_LT'), ('value', 'value_LT')):
        norm_NLT = np.stack([probe[array_name] for probe in probes])
        ratio_NL = norm_NLT[..., 0] / norm_NLT[..., 1:].mean(-1)
        quantities[name] = np.repeat(ratio_NL[..., None], alpha_NLH.shape[-1], -1)
    return np.array([int(file.stem) for file in files]), quantities


def get_alpha(probe: np.lib.npyio.NpzFile) -> np.ndarray:
    """Return the mean attention to the first token of each layer and head."""
    return probe['alpha_LPHJ'][..., 0].mean(1)


def find_half_step(steps: np.ndarray, values_N: np.ndarray) -> int | None:
    """Return the step of the first probe from which on values stay beyond half of their change; None without one."""
    change = values_N[-1] - values_N[0]
    is_beyond_N = (values_N - values_N[0]) * np.sign(change) > abs(change) / 2
    first = len(is_beyond_N) - int(np.argmin(is_beyond_N[::-1])) if not is_beyond_N.all() else 0
    return int(steps[first]) if first < len(steps) else None


def measure_run(path: Path) -> dict:
    """Find the sink heads of a run, and the steps of their quantities."""
    steps, quantities = read_quantities(path)
    heads = [
        dict(layer=int(layer) + 1, head=int(head) + 1)
        | {name: find_half_step(steps, quantities[name][:, layer, head]) for name in QUANTITIES}
        for layer, head in np.argwhere(quantities['attention'][-1] > SINK_THRESHOLD)
    ]
    medians = {name: float(np.median([head[name] for head in heads])) if heads else None for name in QUANTITIES}
    return dict(heads=heads, median=medians)


def compare_orders(results: dict[str, dict]) -> dict[str, dict]:
    """Count, for each quantity, in how many sink heads it comes before, after, or with the attention.

    `p` is the one-sided probability that so many of the heads with different steps come before by chance. Heads of
    one run are not independent, so it is a rough summary.
    """
    orders = {}
    heads = [head for result in results.values() for head in result['heads']]
    for name in QUANTITIES:
        if name == 'attention':
            continue
        differences = [head[name] - head['attention'] for head in heads]
        before, after = sum(x < 0 for x in differences), sum(x > 0 for x in differences)
        p = float(bdtrc(before - 1, before + after, 0.5)) if before else 1.0
        orders[name] = dict(before=before, same=differences.count(0), after=after, p=p)
    return orders


def draw_curves(paths: list[Path], output: Path) -> None:
    """Draw the mean of each quantity over the sink heads of each run, as a share of its change."""
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(paths), figsize=(3.6 * len(paths), 3.2), sharey=True, squeeze=False)
    for axis, path in zip(axes[0], paths, strict=True):
        steps, quantities = read_quantities(path)
        is_sink_LH = quantities['attention'][-1] > SINK_THRESHOLD
        for name, style in zip(QUANTITIES, ('-', '-', '--', ':'), strict=True):
            mean_N = quantities[name][:, is_sink_LH].mean(-1)
            axis.plot(steps, (mean_N - mean_N[0]) / (mean_N[-1] - mean_N[0]), style, label=name)
        axis.axhline(0.5, color='grey', lw=0.5)
        axis.set_title(path.name)
        axis.set_xlabel('step')
    axes[0, 0].set_ylabel('share of the change over the run')
    axes[0, 0].set_ylim(-0.3, 1.4)
    axes[0, 0].legend(fontsize='small')
    figure.tight_layout()
    figure.savefig(output, dpi=150)


if __name__ == '__main__':
    main()
