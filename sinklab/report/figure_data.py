"""Data of the figures of the HTML page, packed into one compressed payload.

assets/unpack.js unpacks the payload. It contains the length of the JSON (four bytes, little-endian), the JSON padded
to a multiple of four bytes, and the arrays.
"""

import base64
import gzip
import json
from typing import Any

import numpy as np

from sinklab.metrics import registry
from sinklab.metrics.emergence import estimate_step
from sinklab.metrics.metric import FigureSpec, MetricInfo
from sinklab.metrics.registry import VALID_LOSS
from sinklab.report.emergence import RunEmergence, compute_span, find_learned_emergences, find_run_emergence
from sinklab.report.run_groups import (
    AxisPoint,
    RunGroup,
    SweepAxis,
    compute_mean_curve,
    find_axes,
)
from sinklab.report.runs import RunResult, find_fork_segments, select_drawn_figures, select_evenly
from sinklab.report.sweep_table import EMERGENCE_METRIC

ALIGNMENT_BYTES = 4
MAX_LEVEL = {'u1': 255, 'u2': 65535}  # the scripts compute it from the type of the array


def pad_to_alignment(data: bytes) -> bytes:
    return data + b' ' * (-len(data) % ALIGNMENT_BYTES)


class BinaryPayload:
    """A buffer of deduplicated arrays that is written behind a JSON header."""

    def __init__(self) -> None:
        self.offsets: dict[bytes, int] = {}  # offset of each distinct array, in the order in which they were added
        self.num_bytes = 0

    def add_array(self, values: Any, dtype: str = 'f4') -> list:
        """Add an array, and return its reference for the JSON: [dtype, byte offset, number of elements]."""
        array = np.ascontiguousarray(values, np.dtype(dtype).newbyteorder('<'))
        data = pad_to_alignment(array.tobytes())
        if data not in self.offsets:
            self.offsets[data] = self.num_bytes
            self.num_bytes += len(data)
        return [dtype, self.offsets[data], array.size]

    def add_quantized(self, values: np.ndarray, scale_min: float, scale_max: float, dtype: str) -> list:
        """Quantize values to unsigned integers, and add the resulting array.

        Args:
            values: Any shape; values outside the range are clipped. NaN and negative infinity count as `scale_min`,
                and positive infinity counts as `scale_max`.
            scale_min: The value of level 0.
            scale_max: The value of the highest level.
            dtype: `u1` (255 is the highest level) or `u2` (65,535).

        Returns:
            The reference of the array, as `add_array` returns it.
        """
        finite = np.nan_to_num(values, nan=scale_min, posinf=scale_max, neginf=scale_min)
        share = (finite - scale_min) / max(scale_max - scale_min, 1e-30)
        return self.add_array(np.rint(np.clip(share, 0, 1) * MAX_LEVEL[dtype]), dtype)

    def encode(self, header: Any) -> str:
        """Encode the JSON header and the arrays as gzip-compressed base64 text."""
        header_bytes = pad_to_alignment(json.dumps(header, allow_nan=False, separators=(',', ':')).encode())
        content_bytes = len(header_bytes).to_bytes(ALIGNMENT_BYTES, 'little') + header_bytes + b''.join(self.offsets)
        return base64.b64encode(gzip.compress(content_bytes, 6, mtime=0)).decode()


LOSSES_SENTENCE = 'lines are training batches, dots are held-out windows.'
TRAIN_LOSS = 'train/loss'
EMERGENCE_AXIS_INFO = MetricInfo(
    EMERGENCE_METRIC,
    'step of emergence',
    'Midpoint of the two probes between which a run reaches half of its last Sink_1.',
    digits=0,
)
TRAIN_INFOS = (
    MetricInfo('train/grad_norm', 'gradient norm', 'Norm of the gradient before clipping.'),
    MetricInfo('train/learning_rate', 'learning rate', 'Learning rate of the step.', digits=5),
    MetricInfo('speed/tokens_per_second', 'tokens/s', 'Throughput of the whole run.', digits=0),
)
MAX_TOTAL_POINTS = 20_000  # points in all curves of one metric together
MAX_POINTS, MIN_POINTS = 400, 40  # limits for one curve
MAX_RUNS_WITH_LOSSES = 8  # with more runs, training losses and metrics outside the run table are left out
DOTTED_KINDS = ('only', 'mean')  # validation losses of these kinds are drawn as dots; members of a mean are left out
CONTEXT_METRICS = ('sink/1', 'sink/star/clean', 'alpha/1', 'entropy/row', 'mass/row')


class LineFigures:
    """A builder of line figures, which adds the curves of run groups to a binary payload."""

    def __init__(self, run_groups: list[RunGroup], payload: BinaryPayload):
        self.run_groups, self.payload = run_groups, payload
        self.runs = [run for run_group in run_groups for run in run_group.runs]
        self.run_indices = {run.name: index for index, run in enumerate(self.runs)}
        self.group_indices = {run_group.name: index for index, run_group in enumerate(run_groups)}
        self.max_points = choose_max_points(len(self.runs))

    def list_metric_infos(self) -> list[MetricInfo]:
        """List the recorded metrics that can be plotted over steps.

        With more than MAX_RUNS_WITH_LOSSES runs, only metrics of the run table and the validation loss are listed.
        """
        names = dict.fromkeys(name for run in self.runs for record in run.records for name in record)
        candidates = [*TRAIN_INFOS, VALID_LOSS, *filter(None, map(registry.find_metric_info, names))]
        has_few_runs = len(self.runs) <= MAX_RUNS_WITH_LOSSES
        return [
            metric_info
            for metric_info in candidates
            if metric_info.name in names and (has_few_runs or metric_info.in_table or metric_info is VALID_LOSS)
        ]

    def make_sink_and_loss_figure(self, as_paper: bool) -> dict | None:
        """Make the figure of Sink_1 and loss over steps, with marks where a sink emerges.

        Args:
            as_paper: Add the published values at the last step.
        """
        sink_panel = self.make_panel(registry.HEADLINE_METRIC)
        sink_panel['emergences'] = [
            self.describe_emergence(run, run_emergence)
            for run in self.runs
            if (run_emergence := find_run_emergence(run)) and run_emergence.span.is_learned
        ]
        loss_panel, loss_sentence = self.make_panel(VALID_LOSS), f'{VALID_LOSS.label}: {VALID_LOSS.description}'
        if len(self.runs) <= MAX_RUNS_WITH_LOSSES and any(run.get_curve(TRAIN_LOSS)[0] for run in self.runs):
            loss_panel, loss_sentence = self.make_loss_panel(), f'loss: {LOSSES_SENTENCE}'
        headline = registry.HEADLINE_METRIC
        sentence = f'{headline.label}: {headline.description} A triangle marks its emergence.'
        if as_paper:
            sink_panel['lines'] += self.make_published_points(registry.HEADLINE_METRIC.name)
            loss_panel['lines'] += self.make_published_points(VALID_LOSS.name)
            sentence += ' Hollow, at the end: published values, at their own size and number of steps.'
        return make_figure('curves', 'Sink and loss', f'{sentence} {loss_sentence}', [sink_panel, loss_panel])

    def make_loss_panel(self) -> dict:
        """Make the panel of the training loss as lines and the validation loss, which has few points, as dots."""
        training, validation = self.make_panel(VALID_LOSS, TRAIN_LOSS), self.make_panel(VALID_LOSS)
        lines = [dict(line, split='training') for line in training['lines']]
        lines += [
            dict(line, split='validation', dots=True) for line in validation['lines'] if line['kind'] in DOTTED_KINDS
        ]
        label = f'loss ({VALID_LOSS.unit})'
        return dict(validation, label=label, lines=lines, sentence=LOSSES_SENTENCE)

    def make_published_points(self, metric_name: str) -> list[dict]:
        """Make a point with the published value of each group, at the last step of its runs."""
        values_of_groups = [
            (index, run_group, run_group.row_info['published'].get(metric_name))
            for index, run_group in enumerate(self.run_groups)
        ]
        steps = {
            index: max((run.records[-1]['step'] for run in run_group.runs if run.records), default=0)
            for index, run_group, _ in values_of_groups
        }
        return [
            dict(kind='published', groups=[index], x=self.payload.add_array([steps[index]], 'i4'))
            | dict(y=self.payload.add_array([value]), sd=self.payload.add_array([0]))
            for index, _, value in values_of_groups
            if value is not None
        ]

    def describe_emergence(self, run: RunResult, run_emergence: RunEmergence) -> dict:
        head_text = (
            f', layer {run_emergence.first_head[0]} head {run_emergence.first_head[1]} first'
            if run_emergence.first_head
            else ''
        )
        return dict(
            run=self.run_indices[run.name],
            x=run_emergence.end_step,
            y=run_emergence.rate,
            text=f'{run_emergence.span.format_sentence()}{head_text}',
        )

    def make_context_figure(self) -> dict | None:
        """Make the figure of metrics over whole training windows, with those of the probe as dashed lines.

        The config fields `log.sinks` and `log.rows` record these metrics. Return None if no run has one.
        """
        names = [
            name for name in CONTEXT_METRICS if any(run.get_last(f'{name}/context') is not None for run in self.runs)
        ]
        panels = []
        for name in names:
            panel = self.make_panel(registry.find_metric_info(name), f'{name}/context')
            panel['lines'] += [
                dict(line, kind='probe', sd=None) for line in self.make_lines(name) if line['kind'] != 'member'
            ]
            panels.append(panel)
        sentence = 'Training batches, over the whole length of their windows; dashed: the probe.'
        return make_figure('context', 'Over the whole context', sentence, panels)

    def make_metric_menu_figure(self) -> dict | None:
        panels = [self.make_panel(metric_info) for metric_info in self.list_metric_infos()]
        return make_figure('metrics', 'Any metric over steps', 'Choose a metric.', panels, kind='menu')

    def make_panel(self, metric_info: MetricInfo, name: str = '') -> dict:
        """Make the panel of a metric over steps; `name` is the recorded name if it is not that of `metric_info`."""
        name = name or metric_info.name
        fork_lines = [
            dict(self.make_line(self.runs[index], steps, values), kind='fork')
            for index, steps, values in find_fork_segments(self.runs, name)
        ]
        return dict(
            make_panel_header(metric_info), kind='steps', x_label='step', lines=self.make_lines(name) + fork_lines
        )

    def make_lines(self, name: str) -> list[dict]:
        return [line for run_group in self.run_groups for line in self.make_group_lines(run_group, name)]

    def make_group_lines(self, run_group: RunGroup, name: str) -> list[dict]:
        """Make the lines of a metric in one group.

        Returns:
            A line for each run that has the metric and, if several runs have common steps, their mean with its sample
            standard deviation. The kind of a run's line is `member` next to a mean and `only` otherwise.
        """
        kind = 'only' if len(run_group.runs) == 1 else 'member'
        lines = [
            dict(self.make_line(run, *run.get_curve(name)), kind=kind)
            for run in run_group.runs
            if run.get_curve(name)[0]
        ]
        if mean_curve := compute_mean_curve(run_group.counted_runs, name):
            indices = select_evenly(len(mean_curve[0]), self.max_points)
            steps, values, spread = (np.asarray(array)[indices] for array in mean_curve)
            mean_line = dict(
                group=self.group_indices[run_group.name],
                run=None,
                kind='mean',
                n=len(run_group.counted_runs),
                sd=self.payload.add_array(spread),
            )
            lines.append(mean_line | dict(x=self.payload.add_array(steps, 'i4'), y=self.payload.add_array(values)))
        elif kind == 'member':
            lines = [line | dict(kind='only') for line in lines]
        return lines

    def make_line(self, run: RunResult, steps: list[int], values: list[float]) -> dict:
        indices = select_extremes(values, self.max_points)
        return dict(
            group=self.group_indices[run.group_name],
            run=self.run_indices[run.name],
            x=self.payload.add_array(np.asarray(steps)[indices], 'i4'),
            y=self.payload.add_array(np.asarray(values)[indices]),
        )

    def make_ratios_figure(self, figure_spec: FigureSpec) -> dict | None:
        """Make the figure of a ratio by block, with the values of each probe."""
        lines = [
            dict(
                group=self.group_indices[run_group.name],
                run=self.run_indices[run.name],
                is_counted=run in run_group.counted_runs,
                steps=run.probe_steps,
                blocks=run.probe_values[figure_spec.name].shape[1],
                y=self.payload.add_array(run.probe_values[figure_spec.name]),
            )
            for run_group in self.run_groups
            for run in run_group.runs
            if run.has_figure(figure_spec)
        ]
        panel = dict(label=figure_spec.label, digits=2, sentence=figure_spec.caption, lines=lines)
        panel |= dict(kind='blocks', x_label='block', reference_value=1)
        return make_figure(figure_spec.name, figure_spec.title, figure_spec.caption, [panel])

    def make_axis_figure(self, axis: SweepAxis) -> dict | None:
        """Make the figure of Sink_1, loss and step of emergence against a config field, with published values."""
        sentence = (
            f'Final values of rows that differ only in {axis.field}, mean and spread over seeds; hollow and dashed: '
            'published values, at their own size. The axis is ordered, but not to scale.'
        )
        panels = [
            self.make_axis_panel(axis, metric_info)
            for metric_info in (registry.HEADLINE_METRIC, VALID_LOSS, EMERGENCE_AXIS_INFO)
        ]
        return make_figure(f'along-{axis.field}', f'Along {axis.name}', sentence, panels)

    def make_axis_panel(self, axis: SweepAxis, metric_info: MetricInfo) -> dict:
        lines = [
            line
            for points in axis.lines
            for line in (
                [self.make_emergence_line(points)]
                if metric_info is EMERGENCE_AXIS_INFO
                else self.make_metric_lines(points, metric_info.name)
            )
            if line
        ]
        return dict(
            make_panel_header(metric_info), kind='sweep', x_label=axis.name, tick_labels=axis.labels, lines=lines
        )

    def make_metric_lines(self, points: list[AxisPoint], metric_name: str) -> list[dict | None]:
        """Make the line of our values of a metric along an axis, and that of the published ones."""
        own_values = [
            (point, point.ours[metric_name]['mean'], point.ours[metric_name]['sd'] or 0)
            for point in points
            if metric_name in point.ours
        ]
        published_values = [
            (point, point.published[metric_name], 0) for point in points if metric_name in point.published
        ]
        return [self.make_axis_line(own_values, 'points'), self.make_axis_line(published_values, 'published')]

    def make_emergence_line(self, points: list[AxisPoint]) -> dict | None:
        """Make the line of the mean step of emergence over the runs that learned a sink.

        The field `texts` holds the interval of steps that is shown for each point. Return None if no run learned a
        sink.
        """
        runs_of_group = {run_group.name: run_group.counted_runs for run_group in self.run_groups}
        entries = [
            (
                point,
                np.array([estimate_step(emergence.start_step, emergence.end_step) for emergence in emergences]),
                compute_span(runs_of_group[point.group_name]).format_cell(),
            )
            for point in points
            if (emergences := find_learned_emergences(runs_of_group[point.group_name]))
        ]
        line = self.make_axis_line(
            [(point, steps.mean(), steps.std(ddof=1) if len(steps) > 1 else 0) for point, steps, _ in entries],
            'points',
        )
        return line and dict(line, texts=[text for *_, text in entries])

    def make_axis_line(self, points: list[tuple], kind: str) -> dict | None:
        """Make a line along an axis from (point, value, standard deviation); return None if there is no point."""
        if not points:
            return None
        return dict(
            kind=kind,
            groups=[self.group_indices[point.group_name] for point, *_ in points],
            x=self.payload.add_array([point.tick for point, *_ in points], 'i4'),
            y=self.payload.add_array([value for _, value, _ in points]),
            sd=self.payload.add_array([sd for *_, sd in points]),
        )


def make_panel_header(metric_info: MetricInfo) -> dict:
    return dict(label=metric_info.axis_label, digits=metric_info.digits, sentence=metric_info.description)


def choose_max_points(num_runs: int) -> int:
    """Choose the largest number of points of one curve, given the number of runs."""
    return int(np.clip(MAX_TOTAL_POINTS // num_runs, MIN_POINTS, MAX_POINTS))


def make_figure(name: str, title: str, sentence: str, panels: list[dict], kind: str = 'lines') -> dict | None:
    """Make a figure of lines from the panels that have at least one line; return None if there is none."""
    nonempty_panels = [panel for panel in panels if panel['lines']]
    if not nonempty_panels:
        return None
    return dict(name=name, kind=kind, title=title, sentence=sentence, panels=nonempty_panels)


def select_extremes(values: list[float], max_points: int) -> list[int]:
    """Select the indices of at most `max_points` values, keeping minima and maxima.

    A curve that is short enough keeps all its values. A longer one is split into `max_points // 2 - 1` equal parts;
    the first value, the last value and the minimum and maximum of each part are kept.
    """
    if len(values) <= max_points:
        return [*range(len(values))]
    indices, start = {0, len(values) - 1}, 0
    for part in np.array_split(np.asarray(values), max_points // 2 - 1):
        indices |= {start + int(part.argmin()), start + int(part.argmax())}
        start += len(part)
    return sorted(indices)


MAX_MAP_VALUES = 1_500_000  # values in all head maps of one figure together
MAX_MATRIX_VALUES = 2_500_000  # values in all attention matrices of one figure together
MAX_MATRIX_RUNS = 24  # runs with attention matrices
MAX_MATRIX_HEADS = 16  # heads of one run
MIN_MATRIX_HEADS = 4  # heads of one run, even if that exceeds the limit on values


def make_head_maps(runs: list[RunResult], figure_spec: FigureSpec, payload: BinaryPayload) -> dict:
    """Make the figure with a map of all layers and heads for each run.

    Each run gets an equal share of MAX_MAP_VALUES, which limits its number of probes.
    """
    drawn_runs = [
        (index, run, run.probe_values[figure_spec.name])
        for index, run in enumerate(runs)
        if run.has_figure(figure_spec)
    ]
    scale_min, scale_max = compute_scale(figure_spec, [values_NLH for _, _, values_NLH in drawn_runs])
    maps = []
    for index, run, values_NLH in drawn_runs:
        probe_indices = select_evenly(
            len(values_NLH), max(1, MAX_MAP_VALUES // len(drawn_runs) // values_NLH[0].size)
        )
        values = payload.add_quantized(values_NLH[probe_indices], scale_min, scale_max, 'u2')
        shape = dict(rows=values_NLH.shape[1], columns=values_NLH.shape[2], first_column=1)
        steps = [run.probe_steps[probe_index] for probe_index in probe_indices]
        maps.append(dict(shape, run=index, steps=steps, values=values))
    header = make_map_header(figure_spec, scale_min, scale_max)
    return dict(header, row_name='layer', column_name='head', maps=maps)


def make_matrix_maps(runs: list[RunResult], figure_spec: FigureSpec, payload: BinaryPayload) -> dict:
    """Make the figure with attention matrices of the strongest heads of the first MAX_MATRIX_RUNS runs.

    Each run gets an equal share of MAX_MATRIX_VALUES, which limits its heads first and then its probes. The last
    probe is always included.
    """
    drawn_runs = [(index, run) for index, run in enumerate(runs) if run.has_figure(figure_spec)][:MAX_MATRIX_RUNS]
    scale_min, scale_max, maps = 0.0, figure_spec.scale_max or 1.0, []
    for index, run in drawn_runs:
        last_LHTS = run.load_matrices(figure_spec)
        queries, keys = last_LHTS.shape[2:]
        max_values = MAX_MATRIX_VALUES // len(drawn_runs) // (queries * keys)
        chosen_heads = run.find_strongest_heads(max(MIN_MATRIX_HEADS, min(MAX_MATRIX_HEADS, max_values)))
        probe_indices = select_evenly(len(run.probe_steps), max(1, max_values // len(chosen_heads)))
        matrices = [run.load_matrices(figure_spec, probe_index) for probe_index in probe_indices[:-1]] + [last_LHTS]
        steps = [run.probe_steps[probe_index] for probe_index in probe_indices]
        for layer, head in chosen_heads:
            head_matrices = np.stack([matrices_LHTS[layer, head] for matrices_LHTS in matrices])
            values = payload.add_quantized(head_matrices, scale_min, scale_max, 'u1')
            shape = dict(rows=queries, columns=keys, first_column=1 - (keys - queries))
            maps.append(dict(shape, layer=layer + 1, head=head + 1, run=index, steps=steps, values=values))
    header = make_map_header(figure_spec, scale_min, scale_max)
    return dict(header, row_name='query', column_name='key', maps=maps, num_runs=len(drawn_runs))


def compute_scale(figure_spec: FigureSpec, values: list[np.ndarray]) -> tuple[float, float]:
    """Compute the limits of a colour scale: from 0, or symmetric around 0 if a value is negative.

    The upper limit is `scale_max` of the figure, or the largest value if it has none.
    """
    scale_max = figure_spec.scale_max or max(float(np.nanmax(array)) for array in values)
    min_value = min(float(np.nanmin(array)) for array in values)
    limit = max(scale_max, -min_value)
    return (-limit, limit) if min_value < 0 else (0.0, scale_max)


def make_map_header(figure_spec: FigureSpec, scale_min: float, scale_max: float) -> dict:
    header = dict(name=figure_spec.name, kind=figure_spec.kind, title=figure_spec.title, sentence=figure_spec.caption)
    return dict(header, label=figure_spec.label, scale_min=scale_min, scale_max=scale_max)


def make_page_data(run_groups: list[RunGroup], rows: list[dict], as_paper: bool) -> tuple[list[dict], str]:
    """Make the figures of the HTML page.

    Args:
        run_groups: The groups of runs, in the order of the page.
        rows: The entries of `make_group_table`, in the same order.
        as_paper: Add published values, and sort and title the figures as in the paper.

    Returns:
        The descriptions of the figures, and the payload that assets/unpack.js unpacks.
    """
    payload, runs = BinaryPayload(), [run for run_group in run_groups for run in run_group.runs]
    page_figures = make_all_figures(run_groups, rows, payload, as_paper)
    if as_paper:
        page_figures = sort_like_paper(page_figures)
    steps = sorted({step for run in runs for step in run.probe_steps})
    header = dict(
        steps=steps,
        groups=[dict(name=run_group.name) for run_group in run_groups],
        runs=[
            dict(name=run.name, group=index) for index, run_group in enumerate(run_groups) for run in run_group.runs
        ],
        figures=[{key: value for key, value in figure.items() if key not in TEXT_KEYS} for figure in page_figures],
    )
    return page_figures, payload.encode(header)


TEXT_KEYS = ('title', 'sentence', 'missing_runs', 'num_runs')  # of figures; page.py writes them as HTML


def make_all_figures(
    run_groups: list[RunGroup], rows: list[dict], payload: BinaryPayload, as_paper: bool
) -> list[dict]:
    line_figures = LineFigures(run_groups, payload)
    runs = line_figures.runs
    figure_makers = dict(
        heads=lambda figure_spec: make_head_maps(runs, figure_spec, payload),
        matrices=lambda figure_spec: make_matrix_maps(runs, figure_spec, payload),
        ratios=line_figures.make_ratios_figure,
    )
    probe_figures = [
        dict(
            figure_makers[figure_spec.kind](figure_spec),
            missing_runs=[run.name for run in runs if run.probe_steps and not run.has_figure(figure_spec)],
        )
        for figure_spec in select_drawn_figures(runs)
    ]
    candidates = [
        line_figures.make_sink_and_loss_figure(as_paper),
        *map(line_figures.make_axis_figure, find_axes(run_groups, rows)),
        line_figures.make_context_figure(),
        *probe_figures,
        line_figures.make_metric_menu_figure(),
    ]
    return [figure for figure in candidates if figure]


# {figure name: (title, number)} in the order of the paper. Numbers are those of arXiv 2410.10781v1, or '' if unknown.
PAPER_FIGURES = {
    'norm': ('Hidden states', ''),
    'key': ('Keys', ''),
    'value': ('Values', ''),
    'cos': ('Queries and keys', ''),
    'attention': ('Attention patterns', ''),
    'alpha': ('Layers and heads', ''),
    'curves': ('Emergence', 'Figure 2A'),
    'along-optimizer.peak_learning_rate': ('Learning rate', 'Figure 2B'),
    'along-data.share': ('Amount of data', 'Figure 2C'),
    'along-optimizer.weight_decay': ('Weight decay', 'Table 1'),
    'along-model.mask.window': ('Window', 'Figure 2D'),
    'along-model.mask.prefix': ('Prefix', 'Figure 3B'),
    'along-optimizer.batch_size': ('Batch', 'Table 6'),
    'along-model.heads': ('Heads', 'Table 9'),
    'along-model.columns.value_norm': ('Norm of a fixed value', 'Table 10'),
    'along-model.attention.gain': ('Gain', 'Table 12'),
}


def sort_like_paper(figures: list[dict]) -> list[dict]:
    """Sort the figures of the paper first, in the order of the paper, and give them its figure numbers."""
    positions = {name: position for position, name in enumerate(PAPER_FIGURES)}
    sorted_figures = sorted(figures, key=lambda figure: positions.get(figure['name'], len(PAPER_FIGURES)))
    return [dict(figure, title=make_paper_title(figure)) for figure in sorted_figures]


def make_paper_title(figure: dict) -> str:
    words, number = PAPER_FIGURES.get(figure['name'], ('', ''))
    if not number:
        return figure['title']
    return f'{number}. {words}' + ('' if figure['name'].startswith('along-') else f': {figure["title"]}')
