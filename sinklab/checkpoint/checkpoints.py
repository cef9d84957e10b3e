"""Checkpoints: asynchronous, of the whole state, with the fingerprint of the data that it was trained on."""

import dataclasses
import sys
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from orbax.checkpoint import v1 as ocp

from sinklab.checkpoint import digests, restore, steps
from sinklab.checkpoint.digests import Fault
from sinklab.checkpoint.log_filters import quiet
from sinklab.checkpoint.orbax import one_line, reaching
from sinklab.checkpoint.storage import room
from sinklab.files.place import absolute
from sinklab.folder import Folder, differences
from sinklab.group import Alone, Group, once, together
from sinklab.record import Refusal
from sinklab.spec import Checkpoint

TOLD = 30.0  # seconds that somebody waits for a save until that is said, and between two times


class Checkpoints:
    """The checkpoints of one run folder, to which all processes of its group come alike.

    `check` is asked, in the background, too, before anything is written, and raises where the folder is another's.
    `run_id` is for a run whose run.json is written after its first checkpoint; otherwise it is read there, or
    in its checkpoints where that file is missing.
    """

    def __init__(
        self,
        folder: Folder,
        rules: Checkpoint,
        data: dict[str, str | int],
        group: Group | None = None,
        check: Callable[[], None] = lambda: None,
        run_id: str | None = None,
    ):
        self.folder, self.rules, self.data, self.group = folder, rules, data, group or Alone()
        self.check_owner = check
        self.run_id = run_id or once(self.group, 'run id', lambda: digests.find_run_id(folder))
        self.pool, self.pending = ThreadPoolExecutor(1, 'checkpoint'), None
        self.seconds: float | None = None  # of the latest finished save, until its digests lay on the disk
        once(self.group, 'folder of checkpoints', lambda: steps.tidy(folder))
        self.newest = self.latest()  # begun, if not yet finished

    def latest(self) -> int | None:
        """The step of the newest finished checkpoint, sound or not."""
        return once(self.group, 'newest checkpoint', lambda: max(self.folder.checkpoint_steps(), default=None))

    def sound(self) -> tuple[int | None, list[str]]:
        """The newest checkpoint that is whole, and a line for each newer one that was passed over and is gone."""
        passed: dict[int, Fault] = {}
        for step in reversed(once(self.group, 'checkpoints', self.folder.checkpoint_steps)):
            if not (fault := fault_of(self.folder, step, self.group)):
                return step, self.pass_over(passed, step)
            passed[step] = fault
        if passed and not is_cut_short(passed):
            faults = '; '.join(f'{step}: {fault.why}' for step, fault in passed.items())
            raise Refusal(
                f'{self.folder.checkpoints} has no sound checkpoint ({faults}); bring the files back, or delete '
                f'{self.folder.checkpoints} alone, and the same command begins anew'
            )
        return None, self.pass_over(passed, None)

    def pass_over(self, passed: dict[int, Fault], newest: int | None) -> list[str]:
        """Makes room for these steps to be saved anew; what was once known to be whole is kept."""
        self.newest = newest

        def clear() -> list[str]:
            with room(self.folder):
                if not is_cut_short(passed):
                    return [f'it lies in {steps.set_aside(self.folder, step)} now' for step in passed]
                return ['; '.join(steps.remove(self.folder, step)) or 'it is deleted' for step in passed]

        ends = once(self.group, 'passed over', clear) if passed else []
        return [
            f'{self.folder.checkpoints / str(step)} is passed over: {fault.why}; {end}'
            for (step, fault), end in zip(passed.items(), ends, strict=True)
        ]

    def restore(self, step: int, abstract: dict) -> dict:
        """The state of a sound step, each leaf where `abstract` says."""
        once(self.group, f'content of checkpoint {step}', lambda: self.check(step, abstract))
        path = self.folder.checkpoints / str(step)
        with one_line(path), reaching(path):
            return ocp.load(absolute(path), abstract)

    def check(self, step: int, abstract: dict) -> None:
        """Refuses a checkpoint of other data or of another model."""
        path = self.folder.checkpoints / str(step)
        saved = restore.metadata(path)
        if differ := differences(saved.custom_metadata['data'], self.data):
            raise Refusal(
                f'{self.folder} was trained on other data ({", ".join(differ)}); bring the old ones back, or give a '
                'new --workdir'
            )
        restore.check_model(path, saved.metadata, abstract)

    def save(self, step: int, state: dict) -> None:
        """Begins to save; raises first what an earlier save has raised."""
        self.wait()
        begun = time.perf_counter()
        path = absolute(self.folder.checkpoints / str(step))
        with room(self.folder), quiet(), reaching(path):
            if self.group.index == 0:
                steps.begin(self.folder, step)
            response = ocp.save_async(path, state, custom_metadata={'data': self.data})
        self.newest, self.pending = step, self.pool.submit(self.finish, step, response, begun)

    def finish(self, step: int, response: Any, begun: float) -> float:
        """In the background: the commit, the digests, and what is no longer kept."""
        path = self.folder.checkpoints / str(step)
        with room(self.folder, saving=path):
            response.result()
        self.check_owner()
        seconds = time.perf_counter() - begun
        digests.write(self.folder, step, self.group.index, self.group.count, seconds, self.run_id)
        seconds = time.perf_counter() - begun
        if self.group.index == 0:
            self.check_owner()
            steps.retain(self.folder, self.rules)
        return seconds

    def poll(self) -> None:
        """Raises what a save in the background has ended with."""
        if self.pending and self.pending.done():
            self.wait()

    def wait(self) -> None:
        """Until nothing is being written."""
        pending: Future[float] | None
        pending, self.pending = self.pending, None
        if pending:
            with room(self.folder):
                self.seconds = self.told(pending).result()

    def told(self, pending: Future[float]) -> Future[float]:
        """What is being written, once it is; that it takes long is said while somebody waits for it."""
        begun, waiting = time.monotonic(), (pending,)
        while futures.wait(waiting, TOLD).not_done:
            words = f'the checkpoint of step {self.newest} is being written to {self.folder}'
            print(f'{words}; waiting for {time.monotonic() - begun:.0f} s', file=sys.stderr, flush=True)
        return pending

    def wait_for_all(self) -> None:
        """Until all processes have saved what they save: who leaves takes the others with it."""
        self.wait()
        self.group.gather('saved', None)

    def drop(self, step: int) -> None:
        """Deletes a checkpoint that turns out to lead nowhere."""
        if self.newest == step:
            self.wait()
            once(self.group, f'drop {step}', lambda: steps.tell(steps.remove(self.folder, step)))
            self.newest = self.latest()

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self.pool.shutdown()


def is_cut_short(passed: dict[int, Fault]) -> bool:
    """Whether nothing but the last save was passed over, whose process did not live to its end."""
    return len(passed) == 1 and all(fault.cut_short for fault in passed.values())


def fault_of(folder: Folder, step: int, group: Group) -> Fault | None:
    """What any process finds in its share of the files of a checkpoint."""
    group.at('verifying a checkpoint', step)

    def own() -> dict | None:
        with room(folder):
            fault = digests.fault(folder, step, group.index, group.count)
        return dataclasses.asdict(fault) if fault else None

    faults = together(group, f'faults of checkpoint {step}', own)
    return next((Fault(**fault) for fault in faults if fault), None)
