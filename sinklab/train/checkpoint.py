"""Checkpoints: Orbax, asynchronous, of the whole state, with the fingerprint of the data that it was trained on."""

from orbax.checkpoint import v1 as ocp

from sinklab.folder import Folder
from sinklab.record import Refusal


class Checkpoints:
    """The checkpoints of one run folder. An error of a save in the background is raised by the next call."""

    def __init__(self, folder: Folder, keep: int, data: dict[str, str | int]):
        self.folder, self.data, self.pending = folder, data, None
        self.checkpointer = ocp.training.Checkpointer(
            folder.checkpoints.absolute(),
            preservation_policy=ocp.training.preservation_policies.LatestN(keep),
            cleanup_tmp_directories=True,
        )

        self.newest = self.latest()  # begun, if not yet finished

    def latest(self) -> int | None:
        """The step of the newest finished checkpoint."""
        newest = self.checkpointer.latest
        return newest.step if newest else None

    def save(self, step: int, state: dict) -> None:
        self.wait()
        self.newest = step
        self.pending = self.checkpointer.save_async(step, state, custom_metadata={'data': self.data})

    def wait(self) -> None:
        """Until nothing is being written."""
        pending, self.pending = self.pending, None
        if pending:
            pending.result()

    def drop(self, step: int) -> None:
        """Deletes a checkpoint that turns out to lead nowhere."""
        if self.newest == step:
            self.wait()
            self.checkpointer.delete(step)
            self.newest = self.latest()

    def restore(self, step: int, abstract: dict) -> dict:
        """The state of a step, each leaf where `abstract` says."""
        try:
            data = self.checkpointer.metadata(step).custom_metadata['data']
            state = self.checkpointer.load(step, abstract)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Refusal(
                f'{self.folder.checkpoints / str(step)} cannot be restored ({str(error).splitlines()[0]}); delete '
                'it, and the same command goes on from the one before'
            ) from error
        names = dict.fromkeys([*self.data, *data])
        differ = [
            f'{name} {data.get(name)} -> {self.data.get(name)}'
            for name in names
            if data.get(name) != self.data.get(name)
        ]
        if differ:
            raise Refusal(
                f'{self.folder} was trained on other data ({", ".join(differ)}); bring the old ones back, or give a '
                'new --workdir'
            )
        return state

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self.checkpointer.close()
