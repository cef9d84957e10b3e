"""The training loop: setup, steps, what is due after each step, and the end of a run."""

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax

from sinklab.attn.backends import BackendChoice
from sinklab.checkpoint.checkpointer import Checkpointer
from sinklab.config.spec import Layout, Spec
from sinklab.data.prefetch import prefetch
from sinklab.data.run_data import RunData, load_run_data
from sinklab.environment import describe_environment
from sinklab.errors import UserError
from sinklab.metrics.registry import HEADLINE_METRIC
from sinklab.model import flops
from sinklab.parallel import device_mesh, sharding
from sinklab.process_group import (
    ProcessGroup,
    broadcast_from_primary,
    check_equal_on_all,
    run_on_all_or_raise,
    set_hang_timer,
)
from sinklab.run_dir import MetricsWriter, RunDir, check_run_dir, format_parent, list_changes
from sinklab.storage.files import poll_until
from sinklab.storage.folder_lock import DEFAULT_GRACE_SECONDS, FolderTakenError, hold_folder, read_owner
from sinklab.train import device_layout, sink_probe, state, step, warm_start
from sinklab.train.callbacks import Callback, StateFunction
from sinklab.train.run_outcome import (
    DivergedError,
    StoppedBySignal,
    collect_stop_signals,
    write_outcome,
)
from sinklab.train.validation_loss import make_validation_fn

PREFETCH_DEPTH = 16  # maximum number of batches that are read and put on devices before their steps
SAVE_REQUEST = 1  # what a process requests by a step: 0 for nothing, 1 for a save, the number of a signal for a stop


def train(
    spec: Spec,
    layout: Layout,
    run_dir: RunDir,
    row: dict,
    *callbacks: Callback,
    state_callbacks: Sequence[tuple[StateFunction, int]] = (),
    group: ProcessGroup | None = None,
    parent: warm_start.WarmStart | None = None,
    grace_seconds: float = DEFAULT_GRACE_SECONDS,
    step_timeout: float = 600.0,
    profile_steps: range = range(0),
) -> None:
    """Train a run, resuming from the newest checkpoint in `run_dir` or from the checkpoint of `parent`.

    Args:
        spec: Config of the run.
        layout: Layout and options of the devices.
        run_dir: Run directory, which is locked. Its metrics.jsonl gets the records.
        row: Content of row.json.
        *callbacks: Callbacks, which are called on process 0 with metrics and messages.
        state_callbacks: Pairs (fn, every) of functions that are called on all processes with the train state after
            every `every` steps and after the last step; with 0, only after the last step.
        group: Processes of the run; None for a single process.
        parent: Checkpoint of another run that a new run starts from; None for a run from scratch.
        grace_seconds: Time to wait for another job that uses the run directory, for example while it stops.
        step_timeout: Seconds without the end of a step after which a run of several processes ends.
        profile_steps: Steps that process 0 traces with the profiler of jax into profile/ of the run directory.

    Raises:
        UserError: The config, layout, data, run directory or warm start does not fit, or the device memory does not
            suffice.
        FolderTakenError: Another job owns the run directory.
        DivergedError: A metric is not finite.
        StoppedBySignal: A signal requested a stop, and a checkpoint was saved.
    """
    group = group or ProcessGroup()
    is_primary = group.process_index == 0
    if not is_primary:
        run_dir = RunDir(run_dir.path, is_writable=False)
        callbacks = ()
    with contextlib.ExitStack() as stack:
        # Lock the run directory. It is checked before, so that no file is written into a directory that is refused,
        # and again, because another job may have used it until now.
        broadcast_from_primary(group, lambda: check_run_dir(run_dir, spec))
        check_owner = stack.enter_context(hold_run_dir(run_dir, group, grace_seconds))
        broadcast_from_primary(group, lambda: check_run_dir(run_dir, spec))
        stack.enter_context(write_outcome(run_dir))
        startup = stack.enter_context(contextlib.ExitStack())  # up to the end of the first step
        startup.enter_context(device_layout.translate_oom_errors())

        # Set up the layout, the attention backend, the data and the files of the run.
        warm_start.check_warm_start(parent, spec, run_dir, group)
        layout, mesh, backend_choice, data = set_up(spec, layout, group)
        broadcast_from_primary(group, lambda: initialize_run_dir(run_dir, spec, row, data, parent))
        stack.enter_context(jax.set_mesh(mesh))
        checkpointer = Checkpointer(run_dir, spec.checkpoint, data.fingerprint, group, check_owner)
        stack.enter_context(close_checkpointer(checkpointer))
        for callback in callbacks:
            stack.callback(callback.on_train_end)

        # Choose the step to resume from. Evaluations that an earlier attempt did not reach are missing at that step.
        start_step = broadcast_from_primary(group, run_dir.read_start_step)
        sound_step, damage_lines = checkpointer.choose_sound_step()
        resume_step = start_step if sound_step is None else sound_step
        send_messages(callbacks, [*damage_lines, *device_layout.format_device_layout(layout, mesh)])
        evaluator = Evaluator(spec, layout, mesh, backend_choice.backend, data, run_dir, start_step)
        logged_names, seconds = broadcast_from_primary(group, lambda: read_resume_record(run_dir, resume_step))
        missing_evals = [name for name in evaluator.find_due(resume_step) if name not in logged_names]
        steps = range(resume_step + 1, spec.optimizer.steps + 1)
        if not steps and not missing_evals:
            return
        start_time = time.perf_counter() - seconds

        # Restore or create the state.
        train_state = restore_or_create_state(checkpointer, sound_step, spec, mesh, parent)
        if is_primary:
            check_owner()
            changes = record_attempt(run_dir, spec, layout, mesh, backend_choice, resume_step)
            if resume_step == start_step:
                changes = [*format_parent(run_dir.read_parent()), *changes]
            for callback in callbacks:
                callback.on_train_begin(resume_step, str(backend_choice), changes)
        if fallback_line := backend_choice.describe_fallback():  # repeated at the end, after thousands of lines
            stack.callback(send_messages, callbacks, [fallback_line])
        writer = stack.enter_context(contextlib.closing(MetricsWriter(run_dir, resume_step, check_owner)))
        logger = MetricsLogger(spec, mesh, data, writer, callbacks, start_time)
        if missing_evals:
            record = {'step': resume_step, 'seconds': logger.get_seconds()}
            record |= evaluator.evaluate(missing_evals, resume_step, train_state['params'])
            logger.report_record(record, is_logged=True)
        if not steps:
            return

        # Compile the step.
        run_step = step.compile_train_step(spec, layout, mesh, backend_choice.backend)
        make_request_array = functools.cache(functools.partial(sharding.make_per_device_array, mesh=mesh))
        batch_shape = spec.optimizer.batch_size, spec.data.length + 1

        def load_batch(step_num: int) -> jax.Array:
            read_rows = functools.partial(data.batches.read_rows, step_num - 1)
            return sharding.load_batch(read_rows, batch_shape, mesh)

        batches = stack.enter_context(contextlib.closing(prefetch(load_batch, steps, PREFETCH_DEPTH)))
        received_signals = stack.enter_context(collect_stop_signals())
        stack.callback(set_hang_timer, 0)
        profiler = stack.enter_context(contextlib.ExitStack())
        last_save_time = time.monotonic()
        logger.restart_timer()

        # Metrics of a step are read while the next step computes, unless the state is needed, which the next step
        # donates. All processes do the same, because a step returns the largest request of all processes.
        unread_metrics = None  # of the step before
        for step_num in steps:
            if group.process_count > 1:
                set_hang_timer(step_timeout)
            checkpointer.raise_save_error()
            save_seconds = 60 * spec.checkpoint.every_minutes
            wants_save = is_primary and 0 < save_seconds < time.monotonic() - last_save_time
            own_request = max([*received_signals, SAVE_REQUEST if wants_save else 0])
            if is_primary and step_num == max(profile_steps.start, steps.start) and step_num in profile_steps:
                jax.block_until_ready(train_state)
                profiler.enter_context(trace_devices(run_dir, callbacks))
            with jax.profiler.StepTraceAnnotation('train', step_num=step_num):
                train_state, step_metrics = run_step(train_state, next(batches), make_request_array(own_request))
            if step_num == steps.start:
                jax.block_until_ready(step_metrics)
                startup.close()
            if is_primary and step_num == profile_steps.stop - 1:
                jax.block_until_ready(train_state)
                profiler.close()
            request = 0
            if unread_metrics:
                metrics, request = read_metrics(step_num - 1, unread_metrics)
                logger.report_record(logger.make_record(step_num - 1, metrics), logger.is_logged(step_num - 1))
            due_evals = evaluator.find_due(step_num)
            due_functions = [function for function, every in state_callbacks if is_due(step_num, every, spec)]
            checkpoint = spec.checkpoint
            is_save_due = is_due(step_num, checkpoint.every_steps, spec) or checkpoint.is_log_step(step_num)
            if not (request or due_evals or due_functions or is_save_due):
                unread_metrics = step_metrics
                continue

            # Evaluate. Before a stop there is no time for that: the next attempt finds what is missing.
            check_owner()
            metrics, newer_request = read_metrics(step_num, step_metrics)
            unread_metrics = None
            request = max(request, newer_request)
            is_stopping = request > SAVE_REQUEST
            record = logger.make_record(step_num, metrics)
            if not is_stopping:
                record |= evaluator.evaluate(due_evals, step_num, train_state['params'])
                for function in due_functions:
                    new_metrics = function(step_num, dict(record), train_state) or {}
                    record |= {name: float(value) for name, value in new_metrics.items()}
            logger.report_record(record, logger.is_logged(step_num) or bool(due_evals or due_functions))
            if request or is_save_due:
                writer.upload()
                checkpointer.save(step_num, train_state)
                last_save_time = time.monotonic()
            if is_stopping:
                checkpointer.wait_until_finished()  # while further signals are collected: a scheduler may repeat it
                raise StoppedBySignal(request, step_num)
            logger.restart_timer()
        checkpointer.wait_until_finished()  # while signals are collected, so that none ends the last save


def restore_or_create_state(
    checkpointer: Checkpointer,
    sound_step: int | None,
    spec: Spec,
    mesh: jax.sharding.Mesh,
    parent: warm_start.WarmStart | None,
) -> dict:
    """Restore a checkpoint; without one, load the state of the parent, or create a new state.

    Raises:
        UserError: A warm start still needs its parent and cannot use it.
    """
    run_dir, group = checkpointer.run_dir, checkpointer.group
    if sound_step is not None:
        return checkpointer.restore(sound_step, state.make_abstract_state(spec, mesh))
    recorded_parent = broadcast_from_primary(group, run_dir.read_parent)
    if not recorded_parent:
        return state.create_state(spec, mesh)
    parent = warm_start.require_parent(parent, run_dir, recorded_parent)
    warm_start.verify_parent(parent, group)
    train_state = warm_start.load_parent_state(parent, spec, mesh)
    checkpointer.save(parent.start_step, train_state)  # after that, the warm start no longer needs its parent
    return train_state


class Evaluator:
    """The evaluations that every run has: the validation loss and the sink probe."""

    def __init__(
        self,
        spec: Spec,
        layout: Layout,
        mesh: jax.sharding.Mesh,
        backend: str,
        data: RunData,
        run_dir: RunDir,
        start_step: int,
    ):
        self.spec, self.data, self.run_dir, self.start_step = spec, data, run_dir, start_step
        self.compute_valid_loss = make_validation_fn(spec, layout, mesh, backend)
        self.compute_probe = sink_probe.make_probe(spec, mesh)

    def find_due(self, step_num: int) -> list[str]:
        """Find the evaluations that are due after a step, at the first and at the last step all of them.

        Returns:
            A metric of each; a record without the metric shows that the evaluation has not run.
        """
        intervals = {'valid/loss': self.spec.valid.every_steps, HEADLINE_METRIC.name: self.spec.probe.every_steps}
        is_first = step_num == self.start_step
        return [name for name, every in intervals.items() if is_first or is_due(step_num, every, self.spec)]

    def evaluate(self, names: list[str], step_num: int, params: dict) -> dict[str, float]:
        """Return the metrics of evaluations, and save the arrays of the probe."""
        metrics: dict[str, float] = {}
        if 'valid/loss' in names:
            metrics |= self.compute_valid_loss(
                params, self.data.valid_NT, self.data.is_trigger(self.data.valid_NT[:, :-1])
            )
        if HEADLINE_METRIC.name in names:
            ids_PT = self.data.probe_PT
            arrays = self.compute_probe(params, ids_PT)
            context = sink_probe.get_probe_context(self.spec)
            if self.run_dir.is_writable:
                sink_probe.save_probe(self.run_dir.get_probe_path(step_num), arrays, context)
            metrics |= sink_probe.compute_probe_metrics(arrays, self.spec, self.data.is_trigger(ids_PT))
        return metrics


class MetricsLogger:
    """Writer of the records of a run, which also passes them to callbacks and measures the speed."""

    def __init__(
        self,
        spec: Spec,
        mesh: jax.sharding.Mesh,
        data: RunData,
        writer: Any,
        callbacks: Sequence[Callback],
        start_time: float,
    ):
        self.spec, self.data, self.writer, self.callbacks = spec, data, writer, callbacks
        self.peak_flops = device_layout.compute_mesh_peak_flops(mesh)
        self.start_time = start_time  # on the clock of this process, as if the run had never stopped
        self.restart_timer()

    def get_seconds(self) -> float:
        """Return the training time of the run over all attempts."""
        return time.perf_counter() - self.start_time

    def restart_timer(self) -> None:
        """Restart the measurement of the speed, to exclude a pause."""
        self.timer_start = time.perf_counter()
        self.num_steps = 0

    def is_logged(self, step_num: int) -> bool:
        return step_num % self.spec.log.every_steps == 0

    def make_record(self, step_num: int, metrics: dict[str, float]) -> dict[str, Any]:
        """Make the record of a step, once for each step; with the speed and the epochs if the step is logged."""
        record = {'step': step_num, 'seconds': self.get_seconds(), **metrics}
        self.num_steps += 1
        if self.is_logged(step_num):
            steps_per_second = self.num_steps / (time.perf_counter() - self.timer_start)
            tokens = self.spec.optimizer.batch_size * self.spec.data.length
            record['speed/tokens_per_second'] = steps_per_second * tokens
            if self.peak_flops:
                record['speed/mfu'] = steps_per_second * flops.count_step_flops(self.spec) / self.peak_flops
            record |= self.data.batches.count_epochs(step_num)
        return record

    def report_record(self, record: dict[str, Any], is_logged: bool) -> None:
        """Append a record to metrics.jsonl if it is logged, and pass it to callbacks.

        Raises:
            DivergedError: A metric is not finite.
        """
        if not all(map(math.isfinite, record.values())):
            raise DivergedError(record['step'], record)
        if is_logged:
            self.writer.append(record)
        for callback in self.callbacks:
            callback.on_record(record, is_logged)
        if is_logged:
            self.restart_timer()


def is_due(step_num: int, every_steps: int, spec: Spec) -> bool:
    """Return whether work is due after a step: at the last step, and at multiples of `every_steps` unless it is 0."""
    return step_num == spec.optimizer.steps or (every_steps > 0 and step_num % every_steps == 0)


def send_messages(callbacks: Sequence[Callback], lines: Iterable[str]) -> None:
    for line in lines:
        for callback in callbacks:
            callback.on_message(line)


def read_metrics(step_num: int, device_metrics: dict[str, jax.Array]) -> tuple[dict[str, float], int]:
    """Wait for the end of a step, and return its metrics and the largest request of all processes.

    Raises:
        DivergedError: A metric is not finite.
    """
    metrics = {name: float(value) for name, value in jax.device_get(device_metrics).items()}
    request = int(metrics.pop('request'))
    if not all(map(math.isfinite, metrics.values())):
        raise DivergedError(step_num, metrics)
    return metrics, request


@contextlib.contextmanager
def trace_devices(run_dir: RunDir, callbacks: Sequence[Callback]) -> Iterator[None]:
    """Trace the devices with the profiler of jax, and say where the trace is."""
    path = run_dir.path / 'profile'
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # calls of Python would fill the trace
    with jax.profiler.trace(str(path), profiler_options=options):
        yield
    send_messages(callbacks, [f'the trace is in {path}, for XProf or TensorBoard'])


@contextlib.contextmanager
def hold_run_dir(run_dir: RunDir, group: ProcessGroup, grace_seconds: float) -> Iterator[Callable[[], None]]:
    """Hold a run directory on process 0, and check that all processes see it; yield what `hold_folder` yields."""
    with contextlib.ExitStack() as stack:
        checks: list[Callable[[], None]] = [lambda: None]

        def hold_on_primary() -> str:
            checks.append(stack.enter_context(hold_folder(run_dir.path, grace_seconds)))
            return read_owner(run_dir.path)['token']

        token = broadcast_from_primary(group, hold_on_primary)
        visible = group.all_gather(poll_until(lambda: read_owner(run_dir.path).get('token') == token))
        if not all(visible):
            raise UserError(
                f'process {visible.index(False)} does not see the files that process 0 writes in {run_dir}; give one '
                'shared folder as --workdir to all processes'
            )
        yield checks[-1]


def set_up(
    spec: Spec, layout: Layout, group: ProcessGroup
) -> tuple[Layout, jax.sharding.Mesh, BackendChoice, RunData]:
    """Choose the layout and the attention backend, check the memory, and load the data.

    Returns:
        The layout with the chosen micro-batch and remat policy, the mesh, the attention backend, and the data. They
        agree on all processes.
    """
    memory_bytes = min(group.all_gather(device_mesh.get_device_memory_bytes()))

    def choose_layout() -> tuple[Layout, jax.sharding.Mesh, BackendChoice]:
        mesh = device_mesh.make_mesh(layout)
        sink_probe.check_probe_memory(spec, memory_bytes)
        chosen_layout, backend_choice = device_layout.choose_layout(spec, layout, mesh, memory_bytes)
        return chosen_layout, mesh, backend_choice

    layout, mesh, backend_choice = run_on_all_or_raise(group, choose_layout)
    check_equal_on_all(group, {'the attention backend': backend_choice.backend, '--remat': layout.remat})
    data = run_on_all_or_raise(group, lambda: load_run_data(spec))
    check_equal_on_all(group, {f'the data ({name})': value for name, value in data.fingerprint.items()})
    return layout, mesh, backend_choice, data


def initialize_run_dir(
    run_dir: RunDir, spec: Spec, row: dict, data: RunData, parent: warm_start.WarmStart | None
) -> None:
    """Write the initial files of a new run; those of a warm start name its parent."""
    if parent and not run_dir.has_run():
        row = row | {'from': warm_start.describe_parent(parent, spec, run_dir, data.fingerprint)}
    run_dir.initialize(spec, row, data.tokenizer)


def read_resume_record(run_dir: RunDir, resume_step: int) -> tuple[list[str], float]:
    """Return the names of the metrics that are logged at a step, and the seconds that the run took to reach it."""
    records = [record for record in run_dir.read_records() if record['step'] <= resume_step]
    names = [name for record in records if record['step'] == resume_step for name in record]
    return names, max((record.get('seconds', 0.0) for record in records), default=0.0)


def record_attempt(
    run_dir: RunDir, spec: Spec, layout: Layout, mesh: jax.sharding.Mesh, choice: BackendChoice, resume_step: int
) -> list[str]:
    """Write the start of an attempt to environment.json and config.json; return the changes of config fields."""
    attempt = dict(
        step=resume_step,
        attention=str(choice),
        micro_batch=layout.get_micro_batch_size(spec.optimizer.batch_size),
        remat=layout.remat,
    )
    changes = list_changes(run_dir, spec)
    if changes:
        attempt['changes'] = changes
    attempts = [*run_dir.read_environment().get('attempts', []), attempt]
    layout_fields = dataclasses.asdict(layout) | dict(mesh.shape)
    run_dir.write_json('environment', describe_environment(layout_fields, str(choice), attempts))
    if run_dir.read_json('config') != dataclasses.asdict(spec):  # also if only the path of a token store is new
        run_dir.write_json('config', dataclasses.asdict(spec))
    return changes


@contextlib.contextmanager
def close_checkpointer(checkpointer: Checkpointer) -> Iterator[None]:
    """Wait for unfinished saves at the end of a run.

    If all processes end in the same way, each waits for all of them. Nothing is awaited if the directory
    belongs to another job by now, or after a second Ctrl-C.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(checkpointer.close)
        try:
            yield
        except (FolderTakenError, KeyboardInterrupt):
            stack.pop_all()
            raise
        except (StoppedBySignal, DivergedError):
            checkpointer.wait_on_all_processes()
            raise
        checkpointer.wait_on_all_processes()
