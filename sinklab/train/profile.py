"""A trace of some steps, as XProf and TensorBoard open it."""

import contextlib
import re
from collections.abc import Callable

import jax

from sinklab.files.place import is_remote
from sinklab.folder import RunDir
from sinklab.record import UserError
from sinklab.train.listener import Callback

PROFILE_DIR = 'profile'  # in the run's folder


def parse_profile_steps(option: str, run_dir: RunDir, last_step: int) -> range:
    """The steps of STEP:COUNT that a run has. Raises Refusal."""
    match = re.fullmatch(r'(\d{1,12}):(\d{1,12})', option)
    first_step, count = map(int, match.groups()) if match else (0, 0)
    if not first_step or not count:
        raise UserError(f'--profile={option}: give STEP:COUNT, both whole numbers from 1 on, such as 100:5')
    if first_step > last_step:
        raise UserError(f'--profile={option} begins after the last step, which is {last_step}; give an earlier STEP')
    if is_remote(run_dir.path):
        raise UserError(f'--profile writes to disks alone, and {run_dir} is in a bucket; give another --workdir')
    return range(first_step, min(first_step + count - 1, last_step) + 1)


class ProfilerCallback(Callback, contextlib.AbstractContextManager):
    """Writes what some steps do, and on which devices, into profile/ of a run.

    A step is dispatched before the numbers of the one before it are there: a trace begins with the numbers of the
    last step but one before those that are asked for, or with the attempt. So it may also have the step before them
    and the one after, what is due after these, and of an attempt's first two steps what is compiled for them.
    """

    def __init__(self, run_dir: RunDir, steps: range, print_line: Callable[[str], None]):
        self.run_dir, self.steps, self.print_line = run_dir, steps, print_line
        self.is_tracing = self.is_resolved = False

    def on_train_begin(self, step: int, attention: str, changes: list[str]) -> None:
        if step >= self.steps[-1]:
            self.report_missed()
        elif step + 2 >= self.steps[0]:
            self.start_trace()

    def on_record(self, record: dict, written: bool) -> None:
        if self.is_tracing and record['step'] >= self.steps[-1]:
            jax.block_until_ready(jax.live_arrays())  # the numbers are of one device, and others may be at work
            self.stop_trace()
            first_step, last_step = self.steps[0], self.steps[-1]
            self.print_line(f'steps {first_step} to {last_step} are traced in {self.run_dir.path / PROFILE_DIR}, for XProf or TensorBoard')
        elif not self.is_tracing and record['step'] + 2 == self.steps[0]:
            self.start_trace()

    def start_trace(self) -> None:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # a million calls of what is compiled would crowd out the steps
        jax.profiler.start_trace(str(self.run_dir.path / PROFILE_DIR), profiler_options=options)
        self.is_tracing = self.is_resolved = True

    def stop_trace(self) -> None:
        if self.is_tracing:
            self.is_tracing = False
            jax.profiler.stop_trace()

    def report_missed(self) -> None:
        self.is_resolved = True
        first_step, last_step = self.steps[0], self.steps[-1]
        self.print_line(f'nothing is traced: this attempt runs none of the steps {first_step} to {last_step} of --profile')

    def __exit__(self, error_type: type[BaseException] | None, *_) -> None:
        self.stop_trace()
        if error_type is None and not self.is_resolved:
            self.report_missed()
