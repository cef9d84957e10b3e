"""A trace of some steps, as XProf and TensorBoard open it."""

import contextlib
import re
from collections.abc import Callable

import jax

from sinklab.files.place import is_remote
from sinklab.folder import Folder
from sinklab.record import Refusal
from sinklab.train.listener import Listener

NAME = 'profile'  # in the run's folder


def asked(given: str, folder: Folder, last: int) -> range:
    """The steps of STEP:COUNT that a run has. Raises Refusal."""
    found = re.fullmatch(r'(\d{1,12}):(\d{1,12})', given)
    first, count = map(int, found.groups()) if found else (0, 0)
    if not first or not count:
        raise Refusal(f'--profile={given}: give STEP:COUNT, both whole numbers from 1 on, such as 100:5')
    if first > last:
        raise Refusal(f'--profile={given} begins after the last step, which is {last}; give an earlier STEP')
    if is_remote(folder.path):
        raise Refusal(f'--profile writes to disks alone, and {folder} is in a bucket; give another --workdir')
    return range(first, min(first + count - 1, last) + 1)


class Profile(Listener, contextlib.AbstractContextManager):
    """Writes what some steps do, and on which devices, into profile/ of a run.

    A step is dispatched before the numbers of the one before it are there: a trace begins with the numbers of the
    last step but one before those that are asked for, or with the attempt. So it may also have the step before them
    and the one after, what is due after these, and of an attempt's first two steps what is compiled for them.
    """

    def __init__(self, folder: Folder, steps: range, say: Callable[[str], None]):
        self.folder, self.steps, self.say = folder, steps, say
        self.going = self.settled = False

    def begin(self, step: int, attention: str, changes: list[str]) -> None:
        if step >= self.steps[-1]:
            self.miss()
        elif step + 2 >= self.steps[0]:
            self.open()

    def record(self, record: dict, written: bool) -> None:
        if self.going and record['step'] >= self.steps[-1]:
            jax.block_until_ready(jax.live_arrays())  # the numbers are of one device, and others may be at work
            self.close()
            first, last = self.steps[0], self.steps[-1]
            self.say(f'steps {first} to {last} are traced in {self.folder.path / NAME}, for XProf or TensorBoard')
        elif not self.going and record['step'] + 2 == self.steps[0]:
            self.open()

    def open(self) -> None:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # a million calls of what is compiled would crowd out the steps
        jax.profiler.start_trace(str(self.folder.path / NAME), profiler_options=options)
        self.going = self.settled = True

    def close(self) -> None:
        if self.going:
            self.going = False
            jax.profiler.stop_trace()

    def miss(self) -> None:
        self.settled = True
        first, last = self.steps[0], self.steps[-1]
        self.say(f'nothing is traced: this attempt runs none of the steps {first} to {last} of --profile')

    def __exit__(self, kind: type[BaseException] | None, *_) -> None:
        self.close()
        if kind is None and not self.settled:
            self.miss()
