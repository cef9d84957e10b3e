"""Tiny runs, and their records without what a clock has to do with."""

from conftest import tiny

from sinklab.folder import Folder
from sinklab.spec import Hardware
from sinklab.train import loop

CLOCK = ('seconds', 'speed/tokens_per_second')


def spec(corpus, **changes):
    return tiny(**{'data__source': corpus, 'checkpoint__every_steps': 4, 'probe__every_steps': 3, **changes})


def train(spec, path, *listeners, **more):
    return loop.train(spec, Hardware(), Folder(path), dict(row='tiny'), *listeners, **more)


def timeless(records, after=0):
    return [
        {name: value for name, value in record.items() if name not in CLOCK}
        for record in records
        if record['step'] > after
    ]
