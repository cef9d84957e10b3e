"""Parsing of --from=[TAKES:]RUN[@STEP]: the parent checkpoint of a fork, and what the fork takes from it."""

import dataclasses
from typing import Any, get_args

from sinklab.checkpoint import digests
from sinklab.cli import hf
from sinklab.config.spec import WarmStartTakes
from sinklab.escape import quote_shell
from sinklab.process_group import (
    ProcessGroup,
    broadcast_from_primary,
    check_equal_on_all,
    run_on_all_or_raise,
)
from sinklab.run_dir import RunDir, format_run_ref
from sinklab.run_ref import HF_PREFIX, parse_run_ref, read_spec, select_steps
from sinklab.schema import UserError
from sinklab.storage.paths import join_path, resolve_path


@dataclasses.dataclass(frozen=True)
class WarmStartFlag:
    """Parsed value of --from; `step` is None if no step is given."""

    flag_text: str
    takes: WarmStartTakes
    run_dir: RunDir
    step: int | None


@dataclasses.dataclass(frozen=True)
class ParentCheckpoint:
    """Checkpoint of the parent run, and what a fork takes from it.

    Once the fork has begun, it no longer needs the parent run, which may be gone.
    """

    run_dir: RunDir
    step: int
    takes: WarmStartTakes


def resolve_parent(from_flag: str | None, child: RunDir, group: ProcessGroup) -> ParentCheckpoint | None:
    """Resolve --from to a parent checkpoint, the same on all processes; process 0 chooses the step.

    Args:
        from_flag: The value of --from; None: not given.
        child: The run folder of the fork.
        group: The process group.

    Returns:
        The parent checkpoint; None if --from is not given.

    Raises:
        UserError: --from is invalid on any process, or differs between processes.
    """
    if from_flag and from_flag.startswith(HF_PREFIX):
        from_flag = run_on_all_or_raise(
            group, 'import of --from', lambda: import_parent_model(from_flag, child, group)
        )
    flag = run_on_all_or_raise(group, '--from', lambda: parse_from_flag(from_flag) if from_flag else None)
    step = broadcast_from_primary(group, 'step of --from', lambda: choose_step(flag, child) if flag else None)
    check_equal_on_all(group, 'steps of --from', {'--from': format_parent_step(flag, step)})
    return ParentCheckpoint(flag.run_dir, step, flag.takes) if flag else None


def import_parent_model(from_flag: str, child: RunDir, group: ProcessGroup) -> str:
    """Import the model of --from=hf:PATH into the cache; return the value of --from for the imported run.

    Raises:
        UserError: There are several processes, which may not all see the cache.
    """
    if group.count > 1:
        raise UserError(
            f'--from={from_flag} is for one process; write it where all of them see it, by sinklab checkpoint import '
            f'{quote_shell(from_flag)} --out=DIR, and give --from=params:DIR'
        )
    return hf.get_cached_import(from_flag, child)


def parse_from_flag(from_flag: str) -> WarmStartFlag:
    """Parse [TAKES:]RUN[@STEP].

    A prefix before the first colon counts as TAKES only if it is a known value, because a path may contain a colon.
    """
    takes, _, run = from_flag.partition(':')
    if takes not in filter(None, get_args(WarmStartTakes)):
        takes, run = '', from_flag
    if not run:
        raise UserError(f'--from={from_flag} names no run; give {format_run_ref(f"--from={takes}", "RUN", "STEP")}')
    return WarmStartFlag(from_flag, takes, *parse_run_ref(run))


def format_parent_step(flag: WarmStartFlag | None, step: int | None) -> str:
    """Format what is taken and the step of --from, for the comparison between processes."""
    if not flag:
        return 'not given'
    return f'{flag.takes and f"{flag.takes} of "}step {step if flag.step is None else flag.step}'


def choose_step(flag: WarmStartFlag, child_dir: RunDir) -> int:
    """Choose the step of the parent checkpoint.

    Returns:
        For a fork that exists already, the step in its row.json; otherwise the given step, or the newest step if none
        is given.

    Raises:
        UserError: The parent is no run, is the child itself, or lacks the step; or the child is another run.
    """
    parent_dir = flag.run_dir
    if resolve_path(parent_dir.path) == resolve_path(child_dir.path):
        raise UserError(f'--from={flag.flag_text} is the --workdir, too; give a new folder')
    if child_dir.has_run():
        return get_recorded_step(flag, child_dir)
    if not parent_dir.has_run():
        raise UserError(
            f'--from={flag.flag_text}: {parent_dir} holds no run; give a run folder, and a step: '
            f'--from={format_run_ref(flag.takes, "RUN", "STEP")}'
        )
    steps, newest_step = (
        select_steps(parent_dir, flag.step),
        digests.find_newest_step(parent_dir),
    )  # the last checkpoint may still be in the process of being saved
    return steps[-1] if flag.step is not None or newest_step is None else newest_step


def get_recorded_step(flag: WarmStartFlag, child_dir: RunDir) -> int:
    """Return the parent step that row.json of an existing fork records.

    Raises:
        UserError: The run is no fork, or a fork of another checkpoint than --from names.
    """
    lineage, parent_dir = child_dir.read_lineage(), flag.run_dir
    if not lineage:
        raise UserError(
            f'{child_dir} holds a run that is no fork; give a new folder, or leave --from out to go on in it'
        )
    recorded_path, recorded_step, takes = (
        join_path(child_dir.path, lineage['run']),
        lineage['step'],
        lineage.get('takes', ''),
    )
    message = (
        f'{child_dir} holds a fork of '
        f'{format_run_ref(takes, recorded_path, recorded_step)}, and --from={flag.flag_text}'
    )
    is_moved = recorded_path != resolve_path(parent_dir.path)
    if flag.step not in (None, recorded_step) or (
        is_moved and digests.compute_checkpoint_digest(parent_dir, recorded_step) != lineage.get('seal')
    ):
        raise UserError(f'{message} is another checkpoint; give that one, wherever it lies now, or a new folder')
    if flag.takes != takes:
        raise UserError(
            f'{message} takes along something else of it; give '
            f'{quote_shell(f"--from={format_run_ref(takes, parent_dir, recorded_step)}")}'
        )
    return recorded_step


def load_warm_start(parent: ParentCheckpoint) -> Any:
    """Load the warm start for the training loop from the parent run; return None if the parent is gone."""
    from sinklab.train.warm_start import WarmStart

    parent_dir = parent.run_dir
    return WarmStart(parent_dir, parent.step, read_spec(parent_dir), parent.takes) if parent_dir.has_run() else None
