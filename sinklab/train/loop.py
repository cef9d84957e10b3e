"""The training loop: steps, logging, evaluations, checkpoints, and stop requests."""

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence

import jax

from sinklab.attn.backends import BackendChoice
from sinklab.checkpoint.checkpointer import Checkpointer
from sinklab.config.spec import Hardware, Spec
from sinklab.data.prefetch import prefetch
from sinklab.data.run_data import RunData
from sinklab.environment import describe_environment
from sinklab.metrics.registry import HEADLINE_METRIC
from sinklab.model import flops
from sinklab.parallel import sharding
from sinklab.process_group import ProcessGroup, broadcast_from_primary, describe_difference, set_hang_timer
from sinklab.resume_checks import check_run_dir, list_changes
from sinklab.run_dir import MetricsWriter, RunDir
from sinklab.storage.folder_lock import DEFAULT_GRACE_SECONDS, FolderTakenError
from sinklab.train import memory_estimate, sink_probe, state, step, warm_start
from sinklab.train.callbacks import (
    Callback,
    StateCallback,
    StateFunction,
    parse_state_callback,
    summarize_newest_attempt,
)
from sinklab.train.replica_check import make_mismatch_finder
from sinklab.train.run_outcome import (
    DivergedError,
    ReplicaMismatchError,
    StoppedBySignal,
    collect_stop_signals,
    write_outcome,
)
from sinklab.train.setup import hold_run_dir, make_row_content, set_up_run
from sinklab.train.validation_loss import make_validation_fn

MAX_STEPS_TO_STOP = 3  # maximum number of steps between a signal and the saved state
PREFETCH_DEPTH = 16  # maximum number of batches that are read and put on devices before their steps


@dataclasses.dataclass(frozen=True)
class Request:
    """A request to all processes after a step: save a checkpoint, or save it and stop.

    Each process passes its request to the step as one number, of which the step returns the largest: 0 for nothing,
    1 for a save, and the number of a signal, which is larger, for a stop.
    """

    save: bool = False
    stop_signal: int | None = None

    @classmethod
    def decode(cls, number: int) -> 'Request':
        return cls(save=number == 1, stop_signal=number if number > 1 else None)

    def encode(self) -> int:
        return self.stop_signal or int(self.save)

    def __bool__(self) -> bool:
        return self.encode() > 0

    def __or__(self, other: 'Request') -> 'Request':
        return max(self, other, key=Request.encode)


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """An evaluation that every run has: the validation loss or the probe.

    It also runs before the first step and after the last one. If an attempt stops before a due evaluation, the next
    attempt runs it first.
    """

    compute: Callable[[int, dict], dict[str, float]]  # (step, train state) -> metrics
    every_steps: int
    metric: str  # a record without this metric shows that the evaluation has not run


def train(
    spec: Spec,
    hardware: Hardware,
    run_dir: RunDir,
    row: dict,
    *callbacks: Callback,
    state_callbacks: Sequence[tuple[StateFunction, int]] = (),
    group: ProcessGroup | None = None,
    origin: warm_start.WarmStart | None = None,
    grace_seconds: float = DEFAULT_GRACE_SECONDS,
    step_timeout: float = 600.0,
) -> list[dict]:
    """Train a run, resuming from the newest checkpoint in `run_dir` or from the checkpoint of `origin`.

    Args:
        spec: Config of the run.
        hardware: Layout and options of the devices.
        run_dir: Run directory, which is locked.
        row: Content of row.json.
        *callbacks: Callbacks, which are called on process 0 with metrics and messages.
        state_callbacks: Pairs (fn, every) of functions that are called on all processes with the train state.
        group: Processes of the run; None for a single process.
        origin: Checkpoint of another run that a new run starts from; None for a run from scratch.
        grace_seconds: Time between a stop signal and the forced end of the run.
        step_timeout: Seconds without the end of a step after which a run of several processes ends.

    Returns:
        All records of the run on process 0, and [] on other processes.

    Raises:
        UserError: The config, layout, data, run directory or warm start does not fit; a program does not fit in
            device memory; or a state callback returned an invalid metric.
        FolderTakenError: Another job owns the run directory.
        DivergedError: A metric is not finite.
        StoppedBySignal: A signal requested a stop, and a checkpoint was saved.
        ReplicaMismatchError: Replicas or processes hold different values.
    """
    parsed_callbacks = tuple(map(parse_state_callback, state_callbacks))
    group = group or ProcessGroup()
    run_dir = RunDir(run_dir.path, is_writable=group.process_index == 0)
    broadcast_from_primary(group, lambda: check_run_dir(run_dir, spec))
    with hold_run_dir(run_dir, group, grace_seconds) as check_owner:
        broadcast_from_primary(
            group, lambda: check_run_dir(run_dir, spec)
        )  # the previous owner of the lease may have changed it
        with write_outcome(run_dir):
            warm_start.check_warm_start(origin, spec, run_dir, group)
            hardware, mesh, backend_choice, data = set_up_run(spec, hardware, run_dir, group)
            row = make_row_content(origin, spec, run_dir, row, data, group)
            broadcast_from_primary(group, lambda: run_dir.initialize(spec, row, data.tokenizer))
            checkpointer = Checkpointer(run_dir, spec.checkpoint, data.fingerprint, group, check_owner)
            oom_translation = memory_estimate.translate_async_oom_errors(
                (spec, hardware, mesh, backend_choice.backend)
            )
            with jax.set_mesh(mesh), oom_translation, close_checkpointer(checkpointer):
                loop = TrainLoop(
                    spec=spec,
                    hardware=hardware,
                    mesh=mesh,
                    backend_choice=backend_choice,
                    run_dir=run_dir,
                    data=data,
                    checkpointer=checkpointer,
                    callbacks=callbacks if group.process_index == 0 else (),
                    state_callbacks=parsed_callbacks,
                    group=group,
                    check_owner=check_owner,
                    grace_seconds=grace_seconds,
                    step_timeout=step_timeout,
                )
                loop.run(origin)
    return run_dir.read_records() if group.process_index == 0 else []


@contextlib.contextmanager
def close_checkpointer(checkpointer: Checkpointer) -> Iterator[None]:
    """Wait for unfinished saves at the end of a run.

    If all processes end in the same way, each waits for all of them. If the lease is lost, nothing is awaited,
    because the directory belongs to another job.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(checkpointer.close)
        try:
            yield
        except FolderTakenError:
            stack.pop_all()
            raise
        except (StoppedBySignal, DivergedError, ReplicaMismatchError):
            checkpointer.wait_on_all_processes()
            raise
        checkpointer.wait_on_all_processes()


@dataclasses.dataclass
class TrainLoop:
    """One attempt at a run: its compiled functions, and the work that is due after each step."""

    spec: Spec
    hardware: Hardware
    mesh: jax.sharding.Mesh
    backend_choice: BackendChoice
    run_dir: RunDir
    data: RunData
    checkpointer: Checkpointer
    callbacks: tuple[Callback, ...]
    state_callbacks: tuple[StateCallback, ...]
    group: ProcessGroup
    check_owner: Callable[[], None]
    grace_seconds: float
    step_timeout: float
    has_warned: bool = False

    def __post_init__(self):
        self.start_step = broadcast_from_primary(self.group, self.run_dir.read_start_step)
        self.program_args = program_args = self.spec, self.hardware, self.mesh, self.backend_choice.backend
        self.translate_oom = functools.partial(memory_estimate.translate_oom_errors, program_args=program_args)
        self.train_step = step.make_train_step(*program_args)
        self.compute_valid_loss = self.translate_oom('validation')(make_validation_fn(*program_args))
        self.compute_probe_arrays = self.translate_oom('the probe')(sink_probe.make_probe(self.spec, self.mesh))
        self.evaluations = (
            Evaluation(self.run_validation, self.spec.valid.every_steps, 'valid/loss'),
            Evaluation(self.run_probe, self.spec.probe.every_steps, HEADLINE_METRIC.name),
        )
        self.last_save_time = time.monotonic()
        self.find_replica_mismatch = make_mismatch_finder(self.spec, self.mesh, self.group)
        self.peak_flops = memory_estimate.compute_mesh_peak_flops(self.mesh)
        self.make_request_array = functools.cache(functools.partial(sharding.make_per_device_array, mesh=self.mesh))

    def run(self, origin: warm_start.WarmStart | None) -> None:
        """Run the attempt, and report its end to callbacks, also after an error."""
        with contextlib.ExitStack() as stack:
            for callback in self.callbacks:
                stack.callback(callback.on_train_end)
            self.run_attempt(origin)

    def run_attempt(self, origin: warm_start.WarmStart | None) -> None:
        resume_step, damage_lines = warm_start.prepare_first_checkpoint(
            origin, self.spec, self.mesh, self.start_step, self.checkpointer
        )
        for line in (
            *damage_lines,
            *self.data.messages,
            *memory_estimate.format_device_layout(*self.program_args),
        ):
            self.send_message(line)
        missing_evals = broadcast_from_primary(self.group, lambda: self.find_missing_evals(resume_step))
        if self.is_last(resume_step) and not missing_evals:
            return
        self.step_timer = StepTimer(
            broadcast_from_primary(self.group, lambda: self.run_dir.read_elapsed_seconds(resume_step))
        )
        with (
            self.report_fallback_at_exit(),
            contextlib.closing(MetricsWriter(self.run_dir, resume_step, self.check_owner)) as self.metrics_writer,
        ):
            restored_state = self.restore(resume_step)
            self.record_attempt(resume_step)
            train_state = restored_state or state.create_state(self.spec, self.mesh)
            self.run_missing_evals(resume_step, missing_evals, train_state)
            if self.is_last(resume_step):
                return
            compiled_step = self.compile_step(train_state)
            with collect_stop_signals() as self.received_signals, contextlib.ExitStack() as stack:
                stack.callback(set_hang_timer, 0)
                self.run_steps(compiled_step, train_state, resume_step)

    @contextlib.contextmanager
    def report_fallback_at_exit(self) -> Iterator[None]:
        """Log at exit that a kernel failed and that another backend computed attention.

        The start of the attempt reports it too, but thousands of lines earlier.
        """
        try:
            yield
        finally:
            if line := self.backend_choice.describe_fallback():
                self.send_message(line)

    def restore(self, resume_step: int) -> dict | None:
        """Restore the train state of a step; return None for a new run, which has no checkpoint."""
        if self.checkpointer.newest_step != resume_step:
            return None
        return self.checkpointer.restore(resume_step, state.make_abstract_state(self.spec, self.mesh))

    def record_attempt(self, resume_step: int) -> None:
        """Write the start of this attempt to environment.json, and report it to callbacks."""
        changes = list_changes(self.run_dir, self.spec)
        attempt = dict(
            step=resume_step,
            attention=str(self.backend_choice),
            micro_batch=self.hardware.get_micro_batch_size(self.spec.optimizer.batch_size),
            remat=self.hardware.remat,
        )
        attempt |= dict(changes=changes) if changes else {}
        attempts = [*self.run_dir.read_environment().get('attempts', []), attempt]
        self.check_owner()
        layout = dataclasses.asdict(self.hardware) | dict(self.mesh.shape)
        self.run_dir.write_json('environment', describe_environment(layout, str(self.backend_choice), attempts))
        if changes:
            self.run_dir.write_json('config', dataclasses.asdict(self.spec))
        for callback in self.callbacks:
            callback.on_train_begin(*summarize_newest_attempt(self.run_dir, attempts))

    def run_missing_evals(self, resume_step: int, missing_evals: list[str], train_state: dict) -> None:
        """Run the evaluations whose metrics are missing, and log them."""
        if missing_evals:
            record = {'step': resume_step, 'seconds': self.step_timer.get_total_seconds()}
            evaluations = [evaluation for evaluation in self.evaluations if evaluation.metric in missing_evals]
            self.report_record(record | self.run_evals(evaluations, resume_step, train_state), is_logged=True)

    def run_steps(self, compiled_step: Callable, train_state: dict, resume_step: int) -> None:
        """Run the steps.

        The metrics of a step are read while the next step computes. If the state after a step is needed, they are
        read at once, because the next step donates the state.
        """
        steps = range(resume_step + 1, self.spec.optimizer.steps + 1)
        unread_metrics, request = None, Request()
        with contextlib.closing(prefetch(self.load_batch, steps, PREFETCH_DEPTH)) as batches:
            for step_num in steps:
                with jax.profiler.StepTraceAnnotation('train', step_num=step_num):
                    train_state, step_metrics = compiled_step(
                        train_state, next(batches), self.make_request_array(self.get_local_request().encode())
                    )
                if unread_metrics:
                    metrics, request = self.finish_step(step_num - 1, unread_metrics)
                    self.log_step(step_num - 1, metrics)
                unread_metrics = step_metrics
                if request or self.is_state_needed(step_num):
                    metrics, newer_request = self.finish_step(step_num, step_metrics)
                    self.evaluate_and_save(step_num, metrics, train_state, request | newer_request)
                    unread_metrics, request = None, Request()

    def compile_step(self, train_state: dict) -> Callable:
        """Compile the train step."""
        translate_oom = self.translate_oom('the step')
        lowered = self.train_step.lower(train_state, *step.make_abstract_inputs(self.spec, self.mesh))
        compiled_step = translate_oom(lowered.compile)()
        self.step_timer.restart()
        return translate_oom(compiled_step)

    def load_batch(self, step_num: int) -> jax.Array:
        shape = self.spec.optimizer.batch_size, self.spec.data.length + 1
        return sharding.load_batch(functools.partial(self.data.batches.read_rows, step_num - 1), shape, self.mesh)

    def get_local_request(self) -> Request:
        """Return the request of this process: stop after a signal, or save by the clock of process 0."""
        if self.received_signals:
            return Request(stop_signal=self.received_signals[0])
        save_seconds = 60 * self.spec.checkpoint.every_minutes
        is_overdue = time.monotonic() - self.last_save_time > save_seconds
        return Request(save=bool(save_seconds and self.group.process_index == 0 and is_overdue))

    def is_state_needed(self, step_num: int) -> bool:
        """Return whether an evaluation, a state callback or a save is due after a step, which needs its state."""
        return bool(
            self.list_due_evals(step_num)
            or self.list_due_state_callbacks(step_num)
            or is_due(step_num, self.spec.checkpoint.every_steps)
        )

    def list_due_evals(self, step_num: int) -> list[Evaluation]:
        """List the evaluations that are due after a step; all of them at the start and after the last step."""
        is_edge = step_num == self.start_step or self.is_last(step_num)
        return [each for each in self.evaluations if is_edge or is_due(step_num, each.every_steps)]

    def list_due_state_callbacks(self, step_num: int) -> list[StateCallback]:
        """List the state callbacks that are due after a step; all of them after the last step."""
        is_last = self.is_last(step_num)
        return [callback for callback in self.state_callbacks if is_last or is_due(step_num, callback.every)]

    def find_missing_evals(self, step_num: int) -> list[str]:
        """Find evaluations that were due after a step and are missing in metrics.jsonl, as after a stop.

        Returns:
            The metrics of these evaluations.
        """
        logged_record = next((record for record in self.run_dir.read_records() if record['step'] == step_num), {})
        due_metrics = [evaluation.metric for evaluation in self.list_due_evals(step_num)]
        return [metric for metric in due_metrics if metric not in logged_record]

    def is_last(self, step_num: int) -> bool:
        return step_num == self.spec.optimizer.steps

    def finish_step(self, step_num: int, device_metrics: dict[str, jax.Array]) -> tuple[dict[str, float], Request]:
        """Wait for the end of a step, count it, and check its metrics.

        Returns:
            The metrics, and the request of all processes, which is the same on all of them.

        Raises:
            DivergedError: A metric is not finite. The checkpoint of the step before, whose parameters gave the
                metric, is deleted.
            FolderTakenError: Another job owns the run directory.
        """
        self.check_owner()
        if self.group.process_count > 1:
            set_hang_timer(self.step_timeout)
        metrics = {name: float(value) for name, value in jax.device_get(device_metrics).items()}
        request = Request.decode(int(metrics.pop('request')))
        if not all(map(math.isfinite, metrics.values())):
            self.checkpointer.delete_if_newest(step_num - 1)
            raise DivergedError(step_num, metrics)
        self.step_timer.count_step()
        return metrics, request

    def make_record(self, step_num: int, metrics: dict[str, float]) -> dict:
        """Make the record of a step, with the speed and the epochs if the step is logged."""
        record = {'step': step_num, 'seconds': self.step_timer.get_total_seconds(), **metrics}
        if self.is_logged(step_num):
            steps_per_second = self.step_timer.get_steps_per_second()
            tokens = self.spec.optimizer.batch_size * self.spec.data.length
            record['speed/tokens_per_second'] = steps_per_second * tokens
            if self.peak_flops:
                record['speed/mfu'] = steps_per_second * flops.count_step_flops(self.spec) / self.peak_flops
            record |= self.data.batches.count_epochs(step_num)
        return record

    def is_logged(self, step_num: int) -> bool:
        return is_due(step_num, self.spec.log.every_steps)

    def log_step(self, step_num: int, metrics: dict[str, float]) -> None:
        """Log a step whose state is not needed."""
        is_logged = self.is_logged(step_num)
        self.report_record(self.make_record(step_num, metrics), is_logged)
        if is_logged:
            self.check_saves()
            self.step_timer.restart()

    def evaluate_and_save(
        self, step_num: int, metrics: dict[str, float], train_state: dict, request: Request
    ) -> None:
        """Evaluate, call state callbacks, log the step, save and stop, as far as each is due or requested."""
        record = self.make_record(step_num, metrics)
        due_evals, due_callbacks = self.list_due_evals(step_num), self.list_due_state_callbacks(step_num)
        callback_error = None
        if not request.stop_signal:
            record |= self.run_evals(due_evals, step_num, train_state)
            try:
                record |= self.call_state_callbacks(due_callbacks, record, train_state)
            except Exception as error:
                callback_error = error  # raised after the save: the state is correct, and the run can resume from it
        self.report_record(record, is_logged=bool(self.is_logged(step_num) or due_evals or due_callbacks))
        if request or self.is_last(step_num) or is_due(step_num, self.spec.checkpoint.every_steps):
            self.save_checkpoint(step_num, train_state, metrics)
        if request.stop_signal:
            raise StoppedBySignal(request.stop_signal, step_num)
        if callback_error:
            raise callback_error
        if self.is_logged(step_num):
            self.check_saves()
        self.step_timer.restart()

    def check_saves(self) -> None:
        """Raise the error of a failed save, and warn if saves are slow."""
        self.checkpointer.raise_save_error()
        self.warn_of_short_grace()

    def run_evals(self, evaluations: list[Evaluation], step_num: int, train_state: dict) -> dict[str, float]:
        """Run evaluations of the state after a step in this order, and return their metrics.

        Raises:
            DivergedError: A metric is not finite.
        """
        new_metrics: dict[str, float] = {}
        for evaluation in evaluations:
            new_metrics |= evaluation.compute(step_num, train_state)
        if not all(map(math.isfinite, new_metrics.values())):
            raise DivergedError(step_num, new_metrics)
        return new_metrics

    def call_state_callbacks(
        self, callbacks: list[StateCallback], record: dict, train_state: dict
    ) -> dict[str, float]:
        """Call the state callbacks of the user, and return their metrics; raises what they raise, or UserError."""
        new_metrics: dict[str, float] = {}
        for callback in callbacks:
            new_metrics |= callback.call(record['step'], record | new_metrics, train_state)
        return new_metrics

    def run_validation(self, step_num: int, train_state: dict) -> dict[str, float]:
        """Compute the validation loss."""
        return self.compute_valid_loss(train_state['params'], self.data.valid_NT, self.data.find_valid_triggers())

    def run_probe(self, step_num: int, train_state: dict) -> dict[str, float]:
        """Measure attention on the probe sequences, and save the arrays of the probe."""
        probe_arrays = self.compute_probe_arrays(train_state['params'], self.data.probe_PT)
        save_arrays = functools.partial(
            sink_probe.save_probe, probe_arrays=probe_arrays, setting=sink_probe.get_probe_setting(self.spec)
        )
        if self.run_dir.is_writable:
            save_arrays(self.run_dir.get_probe_path(step_num))
        return sink_probe.compute_probe_metrics(probe_arrays, self.spec, self.data.is_trigger(self.data.probe_PT))

    def report_record(self, record: dict, is_logged: bool) -> None:
        """Append a record to metrics.jsonl if it is logged, and pass it to callbacks."""
        if is_logged:
            self.check_owner()
            self.metrics_writer.append(record)
        for callback in self.callbacks:
            callback.on_record(record, is_logged)

    def send_message(self, line: str) -> None:
        """Pass a message to the callbacks."""
        for callback in self.callbacks:
            callback.on_message(line)

    def warn_of_short_grace(self) -> None:
        """Warn once if the work between a stop signal and the end takes longer than the grace period."""
        needed_seconds = (self.checkpointer.save_seconds or 0.0) + MAX_STEPS_TO_STOP * (
            self.step_timer.step_seconds or 0.0
        )
        if self.checkpointer.save_seconds and needed_seconds > self.grace_seconds and not self.has_warned:
            self.has_warned = True
            self.send_message(
                f'a save and the steps before it take {needed_seconds:.2g} s, and --grace is '
                f'{self.grace_seconds:g} s: a stopped run may be killed before it is saved; '
                'request a longer grace period, and pass it as --grace'
            )

    def save_checkpoint(self, step_num: int, train_state: dict, metrics: dict[str, float]) -> None:
        if self.checkpointer.newest_step != step_num:
            self.check_replicas(step_num, train_state, metrics)
            self.metrics_writer.upload()
            self.checkpointer.save(step_num, train_state)
            self.last_save_time = time.monotonic()

    def check_replicas(self, step_num: int, train_state: dict, metrics: dict[str, float]) -> None:
        """Check that all processes have the same data, metrics, and bits of replicated parameters."""
        mismatch = self.find_replica_mismatch(step_num, train_state['params'])
        if self.group.process_count > 1 and not mismatch:
            local_values = {'the batch': self.data.batches.compute_digest(step_num - 1)}
            local_values |= {name: value.hex() for name, value in metrics.items()}
            mismatch = describe_difference(self.group.all_gather(local_values))
        if mismatch:
            raise ReplicaMismatchError(step_num, mismatch)


def is_due(step_num: int, every_steps: int) -> bool:
    return every_steps > 0 and step_num % every_steps == 0


class StepTimer:
    """Timer of a run: its training time over all attempts, and steps per second."""

    step_seconds = None  # seconds of a step since the last restart; None before the first step

    def __init__(self, previous_seconds: float):
        self.start_time = time.perf_counter() - previous_seconds
        self.restart()

    def get_total_seconds(self) -> float:
        return time.perf_counter() - self.start_time

    def restart(self) -> None:
        self.lap_start, self.num_steps = time.perf_counter(), 0

    def count_step(self) -> None:
        """Count a step, and update `step_seconds`; call `restart` after a pause to exclude it."""
        self.num_steps += 1
        self.step_seconds = 1 / self.get_steps_per_second()

    def get_steps_per_second(self) -> float:
        """Return the steps per second since the last restart of the timer."""
        return self.num_steps / (time.perf_counter() - self.lap_start)
