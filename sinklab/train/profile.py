"""A trace of some steps, as XProf and TensorBoard open it."""

import contextlib
import re

import jax

from sinklab.files.place import is_remote
from sinklab.folder import Folder
from sinklab.record import Refusal
from sinklab.train.listener import Listener

NAME = 'profile'  # in the run's folder


class Profile(Listener, contextlib.AbstractContextManager):
    """Writes what the steps first, ..., first + count - 1 do, and on which devices, into profile/ of a run."""

    def __init__(self, folder: Folder, given: str):
        steps = re.fullmatch(r'(\d+):(\d+)', given)
        if not steps or not int(steps[1]) or not int(steps[2]):
            raise Refusal(f'--profile={given} is none; give STEP:COUNT, such as 100:5')
        if is_remote(folder.path):
            raise Refusal(f'--profile writes to disks alone, and {folder} is in a bucket; give another --workdir')
        self.folder, self.before, self.last = folder, int(steps[1]) - 1, sum(map(int, steps.groups())) - 1
        self.going = False

    def record(self, record: dict, written: bool) -> None:
        step = record['step']
        if self.going and step >= self.last:
            self.close()
        elif not self.going and self.before <= step < self.last:
            jax.profiler.start_trace(str(self.folder.path / NAME))
            self.going = True

    def close(self) -> None:
        if self.going:
            self.going = False
            jax.profiler.stop_trace()

    def __exit__(self, *_) -> None:
        self.close()
