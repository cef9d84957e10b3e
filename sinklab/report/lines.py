"""The figures of the page that are lines: numbers over steps, along the axis of a sweep, and by block."""

import numpy as np

from sinklab.measure import table as measures
from sinklab.measure.emergence import middle
from sinklab.measure.measure import Number, Picture
from sinklab.measure.table import VALID_LOSS
from sinklab.report.arms import Arm, mean
from sinklab.report.axes import Axis, Point
from sinklab.report.emergence import emergence, learned, span
from sinklab.report.pack import Pack
from sinklab.report.probes import spaced
from sinklab.report.runs import Run, branches
from sinklab.report.sweep import EMERGES

BOTH_LOSSES = 'lines are of training batches, dots of held-out windows.'
TRAIN_LOSS = 'train/loss'
EMERGED = Number(
    EMERGES,
    'step of emergence',
    'Between these two probes a run comes to half of its last Sink_1; the middle is drawn.',
    digits=0,
)
OTHERS = (
    Number('train/grad_norm', 'gradient norm', 'Before it is clipped.'),
    Number('train/learning_rate', 'learning rate', 'Of the step.', digits=5),
    Number('speed/tokens_per_second', 'tokens/s', 'Of the whole run.', digits=0),
)
POINTS = 20_000  # of one number's curves together
MOST, FEWEST = 400, 40  # of one
FEW = 8  # runs whose losses of training are drawn, and all of whose numbers
DRAWN = ('only', 'mean')  # kinds of lines that are drawn as dots: not the runs of a mean
CONTEXT = ('sink/1', 'sink/star/clean', 'alpha/1', 'entropy/row', 'mass/row')


class Lines:
    """Draws numbers of these arms into a pack."""

    def __init__(self, arms: list[Arm], pack: Pack):
        self.arms, self.pack = arms, pack
        self.runs = [run for arm in arms for run in arm.runs]
        self.places = {run.name: at for at, run in enumerate(self.runs)}
        self.points = points(len(self.runs))

    def recorded(self) -> list[Number]:
        """What is offered to be looked at over steps; of many runs, what the table has."""
        names = dict.fromkeys(name for run in self.runs for record in run.records for name in record)
        known = [*OTHERS, VALID_LOSS, *filter(None, map(measures.number, names))]
        few = len(self.runs) <= FEW
        return [number for number in known if number.name in names and (few or number.table or number is VALID_LOSS)]

    def sink_and_loss(self, as_paper: bool) -> dict:
        sink = self.panel(measures.HEADLINE)
        sink['marks'] = [
            self.mark(run, found) for run in self.runs if (found := emergence(run)) and found.span.is_learned
        ]
        loss, meaning = self.panel(VALID_LOSS), f'{VALID_LOSS.label}: {VALID_LOSS.sentence}'
        if len(self.runs) <= FEW and any(run.curve(TRAIN_LOSS)[0] for run in self.runs):
            loss, meaning = self.losses(), f'loss: {BOTH_LOSSES}'
        sentence = f'{measures.HEADLINE.label}: {measures.HEADLINE.sentence} A triangle stands where it has emerged.'
        if as_paper:
            sink['lines'] += self.published(measures.HEADLINE.name)
            loss['lines'] += self.published(VALID_LOSS.name)
            sentence += ' Hollow, at the end: what was published, at its own size and number of steps.'
        return figure('curves', 'Sink and loss', f'{sentence} {meaning}', [sink, loss])

    def losses(self) -> dict:
        """The loss of training as lines, that of validation, which has few points, as dots upon them."""
        training, validation = self.panel(VALID_LOSS, TRAIN_LOSS), self.panel(VALID_LOSS)
        lines = [dict(line, what='training') for line in training['lines']]
        lines += [dict(line, what='validation', dots=True) for line in validation['lines'] if line['kind'] in DRAWN]
        label = f'loss ({VALID_LOSS.unit})'
        return dict(validation, label=label, lines=lines, sentence=BOTH_LOSSES)

    def published(self, name: str) -> list[dict]:
        """A point for each arm, at the last step of its runs."""
        found = [(at, arm, arm.about['published'].get(name)) for at, arm in enumerate(self.arms)]
        steps = {
            at: max((run.records[-1]['step'] for run in arm.runs if run.records), default=0) for at, arm, _ in found
        }
        return [
            dict(kind='published', arms=[at], x=self.pack.add([steps[at]], 'i4'))
            | dict(y=self.pack.add([value]), sd=self.pack.add([0]))
            for at, _, value in found
            if isinstance(value, int | float)
        ]

    def mark(self, run: Run, found) -> dict:
        head = f', layer {found.head[0]} head {found.head[1]} first' if found.head else ''
        return dict(
            run=self.places[run.name],
            x=found.at,
            y=found.height,
            text=f'{found.span.sentence()}{head}',
        )

    def context(self) -> dict | None:
        """What `log.sinks` and `log.rows` have recorded over whole training windows, beside the probe's."""
        names = [name for name in CONTEXT if any(run.last(f'{name}/context') is not None for run in self.runs)]
        panels = []
        for name in names:
            panel = self.panel(measures.number(name), f'{name}/context')
            lines = [line for at, arm in enumerate(self.arms) for line in self.of_arm(at, arm, name)]
            panel['lines'] += [dict(line, kind='dashed', sd=None) for line in lines if line['kind'] != 'member']
            panels.append(panel)
        sentence = 'Of batches of training, over the whole length of their windows; dashed, of the probe.'
        return figure('context', 'Over the whole context', sentence, panels) if panels else None

    def numbers(self) -> dict:
        panels = [self.panel(number) for number in self.recorded()]
        return figure('numbers', 'Any number over steps', 'Choose one.', panels) | dict(kind='choice')

    def panel(self, number: Number, name: str = '') -> dict:
        name = name or number.name
        lines = [line for at, arm in enumerate(self.arms) for line in self.of_arm(at, arm, name)]
        found = branches(self.runs, name)
        links = [dict(self.line(self.runs[at], steps, values), kind='branch') for at, steps, values in found]
        about = dict(label=number.axis, digits=number.digits, sentence=number.sentence)
        return dict(about, x='step', lines=[line for line in lines if line] + links)

    def of_arm(self, at: int, arm: Arm, name: str) -> list[dict]:
        """The mean of its runs with its spread, and they thin; of a single one, itself."""
        kind = 'only' if len(arm.runs) == 1 else 'member'
        lines = [dict(self.line(run, *run.curve(name)), kind=kind) for run in arm.runs if run.curve(name)[0]]
        if found := mean(arm.counted, name):
            kept = spaced(len(found[0]), self.points)
            steps, values, spread = (np.asarray(one)[kept] for one in found)
            band = dict(arm=at, run=None, kind='mean', n=len(arm.counted), sd=self.pack.add(spread))
            lines.append(band | dict(x=self.pack.add(steps, 'i4'), y=self.pack.add(values)))
        elif kind == 'member':
            lines = [line | dict(kind='only') for line in lines]
        return lines

    def line(self, run: Run, steps: list[int], values: list[float]) -> dict:
        place = next(at for at, arm in enumerate(self.arms) if arm.name == run.arm)
        kept = extremes(values, self.points)
        xs, ys = self.pack.add(np.asarray(steps)[kept], 'i4'), self.pack.add(np.asarray(values)[kept])
        return dict(arm=place, run=self.places[run.name], x=xs, y=ys)

    def ratios(self, picture: Picture) -> dict:
        """By block, at each probe."""
        lines = [
            dict(run=self.places[run.name], steps=run.probe_steps, y=self.pack.add(run.values[picture.name]))
            | dict(arm=[arm.name for arm in self.arms].index(run.arm), blocks=run.values[picture.name].shape[1])
            for run in self.runs
            if run.has(picture)
        ]
        panel = dict(label=picture.label, digits=2, sentence=picture.sentence, x='block', lines=lines, rule=1)
        return figure(picture.name, picture.title, picture.sentence, [panel]) | dict(kind='ratios')

    def along(self, axis: Axis) -> dict:
        """Sink, loss and emergence against a field of the config; hollow, what was published."""
        sentence = (
            f'What rows end with that differ in {axis.field} alone, mean and spread over seeds; hollow and dashed, '
            'what was published, at its own size. Values stand in their order, not to scale.'
        )
        panels = [self.axis_panel(axis, number) for number in (measures.HEADLINE, VALID_LOSS, EMERGED)]
        return figure(f'along-{axis.field}', f'Along {axis.name}', sentence, panels)

    def axis_panel(self, axis: Axis, number: Number) -> dict:
        lines = []
        for points in axis.lines:
            if number is EMERGED:
                lines.append(self.emerged(points))
                continue
            ours = [(one, one.ours[number.name]) for one in points if number.name in one.ours]
            theirs = [(one, one.published[number.name]) for one in points if number.name in one.published]
            lines.append(self.axis_line([(one, found['mean'], found['sd'] or 0) for one, found in ours], 'points'))
            lines.append(self.axis_line([(one, value, 0) for one, value in theirs], 'published'))
        about = dict(label=number.axis, digits=number.digits, sentence=number.sentence)
        return dict(about, x=axis.name, ticks=axis.labels, lines=[line for line in lines if line])

    def emerged(self, points: list[Point]) -> dict | None:
        """The steps of emergence of the runs that have learned a sink, read out as intervals."""
        counted = {arm.name: arm.counted for arm in self.arms}
        found = [(one, learned(counted[one.arm])) for one in points]
        spans = [span(counted[one.arm]).cell() for one, each in found if each]
        steps = [(one, np.array([middle(run.after, run.at) for run in each])) for one, each in found if each]
        line = self.axis_line(
            [(one, each.mean(), each.std(ddof=1) if len(each) > 1 else 0) for one, each in steps], 'points'
        )
        return line and dict(line, words=spans)

    def axis_line(self, points: list[tuple], kind: str) -> dict | None:
        names = [arm.name for arm in self.arms]
        return points and dict(
            kind=kind,
            arms=[names.index(point.arm) for point, *_ in points],
            x=self.pack.add([point.at for point, *_ in points], 'i4'),
            y=self.pack.add([value for _, value, _ in points]),
            sd=self.pack.add([sd for *_, sd in points]),
        )


def points(runs: int) -> int:
    """At most so many of each curve."""
    return int(np.clip(POINTS // runs, FEWEST, MOST))


def figure(name: str, title: str, sentence: str, panels: list[dict]) -> dict:
    """Of the panels in which something stands."""
    shown = [panel for panel in panels if panel['lines']]
    return dict(name=name, kind='lines', title=title, sentence=sentence, panels=shown)


def extremes(values: list[float], count: int) -> list[int]:
    """At most so many places: all, or the smallest and the largest value of count / 2 equal parts, and the ends."""
    if len(values) <= count:
        return [*range(len(values))]
    found, start = {0, len(values) - 1}, 0
    for part in np.array_split(np.asarray(values), count // 2 - 1):
        found |= {start + int(part.argmin()), start + int(part.argmax())}
        start += len(part)
    return sorted(found)
