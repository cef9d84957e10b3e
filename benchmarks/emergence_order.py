"""Experiment: what comes first when a sink emerges: the direction of the first key, its value, or its hidden state.

    python -m benchmarks.switch_attention --workdir=runs/switch --seeds=3 --jobs=2
    python -m benchmarks.emergence_order runs/switch/softmax-0 runs/switch/sigmoid_minus_log_t-0 --write

The script reads the probes of finished runs. A sink head has a mean alpha_1 above 0.3 at the last probe. Four
quantities are followed over training in each layer with sink heads:

- direction: the cosine of queries with the first key minus that with other keys; mean over the sink heads;
- attention: alpha_1; mean over the sink heads;
- hidden state: the norm of the first token's hidden state over the mean norm of others, as the layer reads it; it is
  not recorded for the first layer;
- value: the norm of the first token's value over the mean norm of others.

The step of a quantity is that of the first probe from which on it stays beyond half of its change over the run. A
quantity that changes by less than MIN_CHANGES, or to the other side, has none. `start` and `end` are means over all
layers and heads. --write writes docs/results/emergence_order.json and .png, and the tables of mechanism.md; the
picture has the runs with sink heads.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from docs.page_parts import write_part
from docs.reference import format_table
from sinklab.metrics.sink import SINK_THRESHOLD

RESULTS = Path(__file__).resolve().parents[1] / 'docs' / 'results'
# {quantity: its smallest change that counts, with the sign of a sink}.
MIN_CHANGES = {'direction': 0.2, 'attention': 0.1, 'hidden state': 0.5, 'value': -0.2}
# The change of a quantity ends at the mean of these, because single probes are noisy. `end` and the sink heads are of
# the last probe alone.
LAST_PROBES = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('runs', nargs='+', type=Path)
    parser.add_argument('--write', action='store_true')
    args = parser.parse_args()
    results = {path.name: measure_run(path) for path in args.runs}
    for name, result in results.items():
        print(f'{name}: end {result["end"]}')
        for layer in result['layers']:
            print(f'  {layer}')
    orders = count_orders([layer for result in results.values() for layer in result['layers']])
    print(orders)
    if args.write:
        content = dict(runs=results, orders=orders)
        (RESULTS / 'emergence_order.json').write_text(json.dumps(content, indent=1) + '\n')
        write_part(RESULTS / 'mechanism.md', 'order', format_results(content))
        draw_curves([path for path in args.runs if results[path.name]['layers']], RESULTS / 'emergence_order.png')


def read_quantities(path: Path) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Read the steps of all probes of a run, and the quantities as arrays of (probe, layer, head).

    The hidden state of the first layer is NaN.
    """
    files = sorted((path / 'probe').glob('*.npz'))
    if len(files) < LAST_PROBES:
        sys.exit(
            f'emergence_order: {path} has {len(files)} probes; give the folder of a run with {LAST_PROBES} or more'
        )
    probes = [np.load(file) for file in files]
    alpha_NLH = np.stack([probe['alpha_LPHJ'][..., 0].mean(1) for probe in probes])
    cosine_NLH2 = np.stack([probe['cos_LH2'] for probe in probes])
    after_NL, value_NL = (
        np.stack([probe[name][:, 0] / probe[name][:, 1:].mean(-1) for probe in probes])
        for name in ('norm_LT', 'value_LT')
    )
    before_NL = np.concatenate([np.full_like(after_NL[:, :1], np.nan), after_NL[:, :-1]], 1)
    quantities = {
        'direction': cosine_NLH2[..., 0] - cosine_NLH2[..., 1],
        'attention': alpha_NLH,
        'hidden state': np.broadcast_to(before_NL[..., None], alpha_NLH.shape),
        'value': np.broadcast_to(value_NL[..., None], alpha_NLH.shape),
    }
    return np.array([int(file.stem) for file in files]), quantities


def find_sink_heads(quantities: dict[str, np.ndarray]) -> np.ndarray:
    """Return whether each head is a sink head at the last probe, as an array of (layer, head)."""
    return quantities['attention'][-1] > SINK_THRESHOLD


def find_half_step(steps: np.ndarray, values_N: np.ndarray, min_change: float) -> int | None:
    """Return the step of the first probe from which on values stay beyond half of their change.

    Args:
        steps: The steps of the probes.
        values_N: A value for each probe.
        min_change: The smallest change that counts, with its sign.

    Returns:
        None if the values change by less, to the other side, or do not stay there.
    """
    change = (values_N[-LAST_PROBES:].mean() - values_N[0]) * np.sign(min_change)
    if not change >= abs(min_change):
        return None
    is_beyond_N = (values_N - values_N[0]) * np.sign(min_change) > change / 2
    if not is_beyond_N[-1]:
        return None
    last_below = len(is_beyond_N) - 1 - int(np.argmin(is_beyond_N[::-1]))  # the first probe is always below
    return int(steps[last_below + 1])


def measure_run(path: Path) -> dict:
    """Find the layers with sink heads of a run, and the steps of their quantities."""
    steps, quantities = read_quantities(path)
    is_sink_LH = find_sink_heads(quantities)
    layers = [
        dict(layer=int(layer), heads=np.flatnonzero(is_sink_LH[layer]).tolist())
        | {
            name: find_half_step(steps, quantities[name][:, layer, is_sink_LH[layer]].mean(-1), min_change)
            for name, min_change in MIN_CHANGES.items()
        }
        for layer in np.flatnonzero(is_sink_LH.any(-1))
    ]
    start, end = (
        {name: round(float(np.nanmean(quantities[name][index])), 3) for name in MIN_CHANGES} for index in (0, -1)
    )
    return dict(layers=layers, start=start, end=end)


def count_orders(layers: list[dict]) -> dict[str, dict[str, int]]:
    """Count the layers in which each quantity comes before, with, or after the attention, or has no step."""
    orders = {}
    for name in MIN_CHANGES:
        if name == 'attention':
            continue
        pairs = [(layer[name], layer['attention']) for layer in layers if layer['attention'] is not None]
        differences = [step - attention for step, attention in pairs if step is not None]
        orders[name] = dict(
            before=sum(difference < 0 for difference in differences),
            same=sum(difference == 0 for difference in differences),
            after=sum(difference > 0 for difference in differences),
            no_step=len(pairs) - len(differences),
        )
    return orders


def format_results(content: dict) -> str:
    """Format the steps of each layer with sink heads, and the means over all heads of each run."""
    names = list(MIN_CHANGES)
    step_rows = [
        [run, str(layer['layer']), ', '.join(map(str, layer['heads'])), *(str(layer[name] or '-') for name in names)]
        for run, result in content['runs'].items()
        for layer in result['layers']
    ]
    mean_rows = [
        [run, *(f'{result["start"][name]:.2f}, {result["end"][name]:.2f}' for name in names)]
        for run, result in content['runs'].items()
    ]
    steps = format_table(['run', 'layer', 'sink heads', *names], step_rows)
    means = format_table(['run', *names], mean_rows)
    return f'{steps.strip()}\n\nMeans over all layers and heads, before training and at the end:\n\n{means}'


def draw_curves(paths: list[Path], output: Path) -> None:
    """Draw the mean of each quantity over the sink heads of each run, as a share of its change."""
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(paths), figsize=(3.6 * len(paths), 3.2), sharey=True, squeeze=False)
    for axis, path in zip(axes[0], paths, strict=True):
        steps, quantities = read_quantities(path)
        is_sink_LH = find_sink_heads(quantities)
        for name, style in zip(MIN_CHANGES, ('-', '-', '--', ':'), strict=True):
            mean_N = np.nanmean(quantities[name][:, is_sink_LH], -1)
            axis.plot(steps, (mean_N - mean_N[0]) / (mean_N[-LAST_PROBES:].mean() - mean_N[0]), style, label=name)
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
