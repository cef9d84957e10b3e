"""The training loop: setup, steps, what is due after each step, and the end of a run."""

import contextlib
import dataclasses
import functools
import math
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

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
from sinklab.run_dir import MetricsWriter, RunDir, check_run_dir, list_changes
from sinklab.storage.files import poll_until
from sinklab.storage.folder_lock import DEFAULT_GRACE_SECONDS, FolderTakenError, hold_folder, read_owner
from sinklab.train import memory_estimate, sink_probe, state, step, warm_start
from sinklab.train.callbacks import Callback, StateFunction, summarize_newest_attempt
from sinklab.train.run_outcome import (
    DivergedError,
    StoppedBySignal,
    collect_stop_signals,
    write_outcome,
)
from sinklab.train.validation_loss import make_validation_fn

PREFETCH_DEPTH = 16  # maximum number of batches that are read and put on devices before their steps
SAVE_REQUEST = 1  # what a process requests by a step: 0 for nothing, 1 for a save, the number of a signal for a stop

# Spec, layout, mesh and attention backend: the arguments of functions that make a program of a run.
ProgramArgs = tuple[Spec, Layout, jax.sharding.Mesh, str]


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

    Raises:
        UserError: The config, layout, data, run directory or warm start does not fit; a program does not fit in
            device memory; or a state callback returned an invalid metric.
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

        # Set up the layout, the attention backend, the data and the files of the run.
        warm_start.check_warm_start(parent, spec, run_dir, group)
        layout, mesh, backend_choice, data = set_up(spec, layout, group)
        program_args = spec, layout, mesh, backend_choice.backend
        broadcast_from_primary(group, lambda: initialize_run_dir(run_dir, spec, row, data, parent))
        stack.enter_context(jax.set_mesh(mesh))
        checkpointer = Checkpointer(run_dir, spec.checkpoint, data.fingerprint, group, check_owner)
        stack.enter_context(close_checkpointer(checkpointer))
        for callback in callbacks:
            stack.callback(callback.on_train_end)

        # Choose the step to resume from. Evaluations that an earlier attempt did not reach are missing at that step.
        resume = choose_resume_point(checkpointer, parent)
        layout_lines = memory_estimate.format_device_layout(*program_args)
        send_messages(callbacks, [*resume.damage_lines, *layout_lines])
        evaluator = Evaluator(program_args, data, run_dir, state_callbacks, resume.start_step)
        logged_names, seconds = broadcast_from_primary(group, lambda: read_resume_record(run_dir, resume.step))
        missing_evals = [name for name in evaluator.find_due(resume.step).evaluations if name not in logged_names]
        steps = range(resume.step + 1, spec.optimizer.steps + 1)
        if not steps and not missing_evals:
            return
        start_time = time.perf_counter() - seconds

        # Restore or initialize the state.
        if resume.has_checkpoint:
            train_state = checkpointer.restore(resume.step, state.make_abstract_state(spec, mesh))
        elif resume.is_warm_start:
            train_state = warm_start.load_parent_state(parent, spec, mesh)
            checkpointer.save(resume.step, train_state)  # after that, the warm start no longer needs its parent
        else:
            train_state = state.create_state(spec, mesh)
        if is_primary:
            check_owner()
            attempts = record_attempt(run_dir, spec, layout, mesh, backend_choice, resume.step)
            for callback in callbacks:
                callback.on_train_begin(*summarize_newest_attempt(run_dir, attempts))
        if fallback_line := backend_choice.describe_fallback():  # repeated at the end, after thousands of lines
            stack.callback(send_messages, callbacks, [fallback_line])
        writer = stack.enter_context(contextlib.closing(MetricsWriter(run_dir, resume.step, check_owner)))
        logger = MetricsLogger(spec, mesh, data, writer, callbacks, start_time)
        if missing_evals:
            record = {'step': resume.step, 'seconds': logger.get_seconds()}
            record |= evaluator.evaluate(missing_evals, resume.step, train_state['params'])
            logger.report_record(record, is_logged=True)
        if not steps:
            return

        # Compile the step.
        run_step = compile_step(program_args, train_state)
        make_request_array = functools.cache(functools.partial(sharding.make_per_device_array, mesh=mesh))
        batch_shape = spec.optimizer.batch_size, spec.data.length + 1

        def load_batch(step_num: int) -> jax.Array:
            read_rows = functools.partial(data.batches.read_rows, step_num - 1)
            return sharding.load_batch(read_rows, batch_shape, mesh)

        batches = stack.enter_context(contextlib.closing(prefetch(load_batch, steps, PREFETCH_DEPTH)))
        received_signals = stack.enter_context(collect_stop_signals())
        stack.callback(set_hang_timer, 0)
        last_save_time = time.monotonic()
        logger.restart_timer()

        # Metrics of a step are read while the next step computes, unless the state is needed, which the next step
        # donates. All processes do the same, because a step returns the largest request of all processes.
        unread_metrics = None  # of the step before
        for step_num in steps:
            if group.process_count > 1:
                set_hang_timer(step_timeout)
            checkpointer.raise_save_error()
            is_save_due = is_primary and 0 < 60 * spec.checkpoint.every_minutes < time.monotonic() - last_save_time
            own_request = max([*received_signals, SAVE_REQUEST if is_save_due else 0])
            with jax.profiler.StepTraceAnnotation('train', step_num=step_num):
                train_state, step_metrics = run_step(train_state, next(batches), make_request_array(own_request))
            request = 0
            if unread_metrics:
                metrics, request = read_metrics(step_num - 1, unread_metrics)
                logger.report_record(logger.make_record(step_num - 1, metrics), logger.is_logged(step_num - 1))
            due = evaluator.find_due(step_num)
            if not request and not any(due):
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
                record |= evaluator.evaluate(due.evaluations, step_num, train_state['params'])
            try:
                for function in due.state_functions if not is_stopping else []:
                    record |= call_state_function(function, step_num, record, train_state)
            finally:  # also after an error in a state function: the state is correct, and the run can resume from it
                is_logged = logger.is_logged(step_num) or bool(due.evaluations or due.state_functions)
                logger.report_record(record, is_logged)
                if request or due.save:
                    writer.upload()
                    checkpointer.save(step_num, train_state)
                    last_save_time = time.monotonic()
            if is_stopping:
                checkpointer.wait_until_finished()  # while further signals are collected: a scheduler may repeat it
                raise StoppedBySignal(request, step_num)
            logger.restart_timer()
        checkpointer.wait_until_finished()  # while signals are collected, so that none ends the last save


class ResumePoint(NamedTuple):
    """The step after which an attempt begins, and where its state comes from."""

    start_step: int  # after which the run began: 0, or that of its parent
    step: int
    has_checkpoint: bool  # at `step`; otherwise the state comes from the parent, or is initialized
    is_warm_start: bool
    damage_lines: list[str]  # about checkpoints that are skipped


def choose_resume_point(checkpointer: Checkpointer, parent: warm_start.WarmStart | None) -> ResumePoint:
    """Choose the newest sound checkpoint, or the start of the run if there is none.

    Raises:
        UserError: All checkpoints are damaged, or a warm start still needs its parent and cannot use it.
    """
    run_dir, group = checkpointer.run_dir, checkpointer.group
    start_step = broadcast_from_primary(group, run_dir.read_start_step)
    sound_step, damage_lines = checkpointer.choose_sound_step()
    if sound_step is not None:
        return ResumePoint(start_step, sound_step, True, False, damage_lines)
    if recorded := broadcast_from_primary(group, run_dir.read_parent):
        warm_start.require_parent(parent, run_dir, recorded)
        warm_start.verify_parent(parent, group)
    return ResumePoint(start_step, start_step, False, bool(recorded), damage_lines)


class DueWork(NamedTuple):
    """Work that is due after a step and needs its state."""

    evaluations: list[str]  # names of metrics; a record without the metric shows that the evaluation has not run
    state_functions: list[StateFunction]
    save: bool


class Evaluator:
    """The evaluations that every run has: the validation loss and the sink probe."""

    def __init__(
        self,
        program_args: ProgramArgs,
        data: RunData,
        run_dir: RunDir,
        state_callbacks: Sequence[tuple[StateFunction, int]],
        start_step: int,
    ):
        self.spec, _, mesh, _ = program_args
        self.data, self.run_dir, self.state_callbacks, self.start_step = data, run_dir, state_callbacks, start_step
        translate_oom = memory_estimate.translate_oom_error_of_first_call
        self.compute_valid_loss = translate_oom(make_validation_fn(*program_args), 'validation')
        self.compute_probe = translate_oom(sink_probe.make_probe(self.spec, mesh), 'the probe')

    def find_due(self, step_num: int) -> DueWork:
        """Find what is due after a step; evaluations also before the first step, everything after the last one."""

        def is_due(every_steps: int) -> bool:
            return is_last or is_multiple(step_num, every_steps)

        is_last = step_num == self.spec.optimizer.steps
        intervals = {'valid/loss': self.spec.valid.every_steps, HEADLINE_METRIC.name: self.spec.probe.every_steps}
        return DueWork(
            [name for name, every in intervals.items() if is_due(every) or step_num == self.start_step],
            [function for function, every in self.state_callbacks if is_due(every)],
            is_due(self.spec.checkpoint.every_steps),
        )

    def evaluate(self, names: list[str], step_num: int, params: dict) -> dict[str, float]:
        """Return the metrics of evaluations, and save the arrays of the probe; raises DivergedError."""
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
        if not all(map(math.isfinite, metrics.values())):
            raise DivergedError(step_num, metrics)
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
        self.peak_flops = memory_estimate.compute_mesh_peak_flops(mesh)
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
        return is_multiple(step_num, self.spec.log.every_steps)

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
        """Append a record to metrics.jsonl if it is logged, and pass it to callbacks."""
        if is_logged:
            self.writer.append(record)
        for callback in self.callbacks:
            callback.on_record(record, is_logged)
        if is_logged:
            self.restart_timer()


def compile_step(program_args: ProgramArgs, train_state: dict) -> Callable:
    """Compile the train step; raises UserError if the device memory does not suffice for it."""
    spec, _, mesh, _ = program_args
    lowered = step.make_train_step(*program_args).lower(train_state, *step.make_abstract_inputs(spec, mesh))
    with memory_estimate.translate_oom_errors('the step'):
        compiled_step = lowered.compile()
    return memory_estimate.translate_oom_error_of_first_call(compiled_step, 'the step')


def is_multiple(step_num: int, every_steps: int) -> bool:
    return every_steps > 0 and step_num % every_steps == 0


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


def call_state_function(
    function: StateFunction, step_num: int, record: dict[str, Any], train_state: dict
) -> dict[str, float]:
    """Call a function with the train state, and return its metrics; raises UserError if they are invalid."""
    metrics = {name: float(value) for name, value in (function(step_num, dict(record), train_state) or {}).items()}
    if metrics.keys() & record.keys() or not all(map(math.isfinite, metrics.values())):
        raise UserError(f'{function!r} returned {metrics}; return finite numbers, with names that {[*record]} lacks')
    return metrics


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
    host_names = group.all_gather(platform.node())
    num_local_processes = host_names.count(host_names[group.process_index])  # they share the memory of this host
    memory_bytes = min(group.all_gather(device_mesh.get_device_memory_bytes(num_local_processes)))

    def choose_layout() -> tuple[Layout, jax.sharding.Mesh, BackendChoice]:
        mesh = device_mesh.make_mesh(layout)
        memory_estimate.check_layout(spec, layout, mesh)
        local_devices = jax.local_devices()
        is_cpu = local_devices[0].platform == 'cpu'  # devices of a host share its memory
        sink_probe.check_probe_memory(spec, memory_bytes * len(local_devices) if is_cpu else memory_bytes)
        chosen = dataclasses.replace(layout, micro_batch=memory_estimate.choose_micro_batch(spec, layout, mesh))
        memory_estimate.check_batch_memory(spec, chosen, mesh, memory_bytes)
        choice = step.choose_verified_backend(spec, chosen)
        remat = memory_estimate.choose_remat_policy(spec, chosen, mesh, choice.backend, memory_bytes)
        return dataclasses.replace(chosen, remat=remat), mesh, choice

    layout, mesh, backend_choice = run_on_all_or_raise(group, choose_layout)
    check_equal_on_all(group, {'the attention backend': backend_choice.backend})
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
) -> list[dict[str, Any]]:
    """Write the start of an attempt to environment.json, and changed fields to config.json; return all attempts."""
    attempt = dict(
        step=resume_step,
        attention=str(choice),
        micro_batch=layout.get_micro_batch_size(spec.optimizer.batch_size),
        remat=layout.remat,
    )
    if changes := list_changes(run_dir, spec):
        attempt['changes'] = changes
    attempts = [*run_dir.read_environment().get('attempts', []), attempt]
    layout_fields = dataclasses.asdict(layout) | dict(mesh.shape)
    run_dir.write_json('environment', describe_environment(layout_fields, str(choice), attempts))
    if run_dir.read_json('config') != dataclasses.asdict(spec):  # also if only the path of a token store is new
        run_dir.write_json('config', dataclasses.asdict(spec))
    return attempts


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
