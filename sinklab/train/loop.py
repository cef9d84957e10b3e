"""The training loop: steps, logging, evaluations, checkpoints, and stop requests."""

import contextlib
import dataclasses
import functools
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from sinklab.attn.backends import BackendChoice
from sinklab.checkpoint import orbax_compat
from sinklab.checkpoint.checkpointer import Checkpointer
from sinklab.checkpoint.orbax_compat import translate_storage_errors
from sinklab.config.spec import Hardware, Spec
from sinklab.data.batches import RunData
from sinklab.metrics.registry import HEADLINE_METRIC
from sinklab.model import flops
from sinklab.parallel import sharding
from sinklab.parallel.device_mesh import MESH_AXES
from sinklab.process_group import (
    ProcessGroup,
    SingleProcessGroup,
    broadcast_from_primary,
    describe_difference,
)
from sinklab.run_dir import RunDir
from sinklab.storage.lease import (
    DEFAULT_GRACE_SECONDS,
    Lease,
    LeaseLostError,
    NullLease,
)
from sinklab.train import (
    memory_estimate,
    sink_probe,
    state,
    step,
    warm_start,
)
from sinklab.train.callbacks import Callback
from sinklab.train.evaluate import make_evaluate
from sinklab.train.run_outcome import (
    DivergedError,
    ReplicaMismatchError,
    StoppedBySignal,
    collect_stop_signals,
    write_outcome,
)
from sinklab.train.setup import (
    acquire_lease,
    add_lineage,
    describe_environment,
    set_up_run,
)

# Requests of a process to all processes, of which the largest is met. Larger numbers are those of SIGINT or SIGTERM,
# which request a stop.
NO_REQUEST, SAVE_REQUEST = 0, 1
MAX_STEPS_TO_STOP = 3  # maximum number of steps between a signal and the saved state
PREFETCH_DEPTH = 16  # maximum number of batches that are read and put on devices before their steps
PREFETCH_CLOSE_SECONDS = 5.0  # seconds that `close` waits for the thread; one that hangs is abandoned
T = TypeVar('T')
# Evaluations of a state, and for each of them a metric that it always adds to its record.
METRIC_OF_EVAL = {'valid': 'valid/loss', 'probe': HEADLINE_METRIC.name}


def train(
    spec: Spec,
    hardware: Hardware,
    run_dir: RunDir,
    row: dict,
    *callbacks: Callback,
    group: ProcessGroup | None = None,
    origin: warm_start.WarmStart | None = None,
    grace_seconds: float = DEFAULT_GRACE_SECONDS,
) -> list[dict]:
    """Train a run, resuming from the newest checkpoint in `run_dir` or from the checkpoint of `origin`.

    Args:
        spec: Config of the run.
        hardware: Layout and options of the devices.
        run_dir: Run directory, which is locked by a lease.
        row: Content of row.json.
        *callbacks: Callbacks, which are called on process 0.
        group: Processes of the run; None for a single process.
        origin: Checkpoint of another run that a new run starts from; None for a run from scratch.
        grace_seconds: Time between a stop signal and the forced end of the run.

    Returns:
        All records of the run on process 0, and [] on other processes.

    Raises:
        UserError: The run cannot begin: only its outcome was written, and no step was compiled. Later, a program does
            not fit in device memory.
        DivergedError: A metric is not finite.
        StoppedBySignal: A signal requested a stop, and a checkpoint was saved.
        ReplicaMismatchError: Replicas or processes hold different values.
    """
    orbax_compat.install_filters()
    group = group or SingleProcessGroup()
    run_dir = run_dir if group.index == 0 else run_dir.as_read_only()
    broadcast_from_primary(group, 'folder', lambda: run_dir.check_spec(spec))
    with acquire_lease(run_dir, group, grace_seconds) as lease:
        broadcast_from_primary(
            group, 'folder, held', lambda: run_dir.check_spec(spec)
        )  # again, as the previous owner of the lease has left it
        with write_outcome(run_dir), translate_storage_errors(run_dir):
            warm_start.check_warm_start(origin, spec, run_dir, group)
            hardware, mesh, attention, data = set_up_run(spec, hardware, run_dir, group)
            row = add_lineage(origin, spec, run_dir, row, data, group)
            broadcast_from_primary(group, 'claim', lambda: run_dir.initialize(spec, row, data.tokenizer))
            checkpointer = Checkpointer(run_dir, spec.checkpoint, data.fingerprint, group, lease.check)
            oom_translation = memory_estimate.translate_async_oom_errors((spec, hardware, mesh, attention.backend))
            with jax.set_mesh(mesh), oom_translation, close_checkpointer(checkpointer):
                loop = TrainLoop(
                    spec,
                    hardware,
                    mesh,
                    attention,
                    run_dir,
                    data,
                    checkpointer,
                    callbacks,
                    group,
                    lease,
                    grace_seconds,
                )
                loop.train(origin)
    return run_dir.read_records(spec.optimizer.steps) if group.index == 0 else []


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
        except LeaseLostError:
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
    attention: BackendChoice
    run_dir: RunDir
    data: RunData
    checkpointer: Checkpointer
    callbacks: tuple[Callback, ...]
    group: ProcessGroup
    lease: Lease | NullLease
    grace_seconds: float
    has_warned: bool = False

    def __post_init__(self):
        self.start_step = broadcast_from_primary(self.group, 'start', self.run_dir.read_start_step)
        self.program_args = program_args = self.spec, self.hardware, self.mesh, self.attention.backend
        self.translate_oom = functools.partial(memory_estimate.translate_oom_errors, program_args=program_args)
        self.train_step, self.evaluate = (
            step.make_train_step(*program_args),
            self.translate_oom('validation')(make_evaluate(*program_args)),
        )
        self.run_probe = self.translate_oom('the probe')(sink_probe.make_probe(self.spec, self.mesh))
        self.last_save_time = time.monotonic()
        self.find_replica_mismatch = make_mismatch_finder(self.spec, self.mesh, self.group)
        self.peak_flops = memory_estimate.get_peak_flops(self.mesh)
        self.make_request_array = functools.cache(functools.partial(sharding.make_per_device_array, mesh=self.mesh))

    def train(self, origin: warm_start.WarmStart | None) -> None:
        resume_step, quarantine_lines = warm_start.prepare_first_checkpoint(
            origin, self.spec, self.mesh, self.start_step, self.checkpointer
        )
        lost_lines = broadcast_from_primary(self.group, 'lost lines', lambda: self.describe_lost_lines(resume_step))
        for line in (
            *quarantine_lines,
            *lost_lines,
            *self.data.messages,
            *memory_estimate.format_device_layout(*self.program_args),
        ):
            self.log_line(line)
        missing_evals = broadcast_from_primary(self.group, 'owed', lambda: self.find_missing_evals(resume_step))
        if self.is_last(resume_step) and not missing_evals:
            return
        self.data.start_prefetch(resume_step)
        self.stopwatch = StepTimer(
            broadcast_from_primary(self.group, 'seconds', lambda: self.run_dir.read_elapsed_seconds(resume_step))
        )
        with (
            self.report_fallback_at_exit(),
            contextlib.closing(self.run_dir.open_metrics_writer(self.lease.check)) as self.metrics_writer,
        ):
            train_state = self.restore_or_create(resume_step, missing_evals)
            if not self.is_last(resume_step):
                compiled_step = self.compile_step(train_state)
                with collect_stop_signals() as self.received_signals:
                    self.run_steps(compiled_step, train_state, resume_step)

    @contextlib.contextmanager
    def report_fallback_at_exit(self) -> Iterator[None]:
        """Log at exit that a kernel failed and that another backend computed attention.

        The start of the attempt reports it too, but thousands of lines earlier.
        """
        try:
            yield
        finally:
            if line := self.attention.describe_fallback():
                self.log_line(line)

    def restore_or_create(self, resume_step: int, missing_evals: list[str]) -> dict:
        """Restore or create the train state, report the start of the attempt, and run missing evaluations."""
        self.group.report_progress('restoring', resume_step)
        has_checkpoint = self.checkpointer.newest_step == resume_step
        train_state = (
            self.checkpointer.restore(resume_step, state.make_abstract_state(self.spec, self.mesh))
            if has_checkpoint
            else None
        )
        changes, attempt = (
            self.run_dir.list_changes(self.spec),
            {'step': resume_step, 'attention': str(self.attention)},
        )
        attempts = [
            *self.run_dir.read_environment().get('attempts', []),
            attempt | ({'changes': changes} if changes else {}),
        ]
        self.lease.check()
        layout = dataclasses.asdict(self.hardware) | dict(self.mesh.shape)
        self.run_dir.write_json('environment', describe_environment(layout, str(self.attention), attempts))
        if changes:
            self.run_dir.write_json('config', dataclasses.asdict(self.spec))
        for callback in self.callbacks:
            callback.on_train_begin(*self.run_dir.summarize_newest_attempt(attempts))
        train_state = train_state or state.create_state(self.spec, self.mesh)
        if missing_evals:
            metrics = self.run_evals(resume_step, train_state['params'], missing_evals)
            self.write_record(
                {'step': resume_step, 'seconds': self.stopwatch.get_total_seconds(), **metrics}, written=True
            )
        return train_state

    def run_steps(self, compiled_step: Callable, train_state: dict, resume_step: int) -> None:
        """Run the steps; metrics of a step are read during the next step, or immediately if needed."""
        pending, request, steps = None, NO_REQUEST, range(resume_step + 1, self.spec.optimizer.steps + 1)
        with contextlib.closing(Prefetcher(self.load_batch, steps, PREFETCH_DEPTH)) as batches:
            for step_num in steps:
                self.group.report_progress('reading its batch', step_num)
                with jax.profiler.StepTraceAnnotation('train', step_num=step_num):
                    train_state, metrics = compiled_step(
                        train_state, batches.get(), self.make_request_array(self.get_local_request())
                    )
                if pending:
                    request = self.process_metrics(*pending)
                pending = step_num, metrics
                if request or self.is_state_needed(step_num):
                    self.process_metrics(step_num, metrics, train_state, request)
                    pending, request = None, NO_REQUEST

    def compile_step(self, train_state: dict) -> Callable:
        """Compile the train step."""
        self.group.report_progress('compiling')
        lowered, translate_oom = (
            self.train_step.lower(train_state, *step.make_abstract_inputs(self.spec, self.mesh)),
            self.translate_oom('the step'),
        )
        compiled_step = translate_oom(lowered.compile)()
        self.stopwatch.restart()
        return translate_oom(compiled_step)

    def load_batch(self, step_num: int) -> jax.Array:
        shape = self.spec.optimizer.batch_size, self.spec.data.length + 1
        return sharding.load_batch(functools.partial(self.data.batches.read_rows, step_num - 1), shape, self.mesh)

    def get_local_request(self) -> int:
        """Return the request of this process: stop after a signal, or save by the clock of process 0."""
        every_minutes = self.spec.checkpoint.every_minutes
        is_save_overdue = (
            every_minutes and self.group.index == 0 and time.monotonic() - self.last_save_time > 60 * every_minutes
        )
        return self.received_signals[0] if self.received_signals else SAVE_REQUEST if is_save_overdue else NO_REQUEST

    def is_state_needed(self, step_num: int) -> bool:
        """Return whether an evaluation or a save is due after a step, which needs its state."""
        return bool(self.list_due_evals(step_num)) or is_due(step_num, self.spec.checkpoint.every_steps)

    def list_due_evals(self, step_num: int) -> list[str]:
        """List the evaluations that are due after a step; all of them at the start and after the last step."""
        is_edge = step_num == self.start_step or self.is_last(step_num)
        return [name for name in METRIC_OF_EVAL if is_edge or is_due(step_num, getattr(self.spec, name).every_steps)]

    def find_missing_evals(self, step_num: int) -> list[str]:
        """Find evaluations that were due after a step and are missing in metrics.jsonl, as after a stop."""
        logged_record = next((record for record in self.run_dir.read_records() if record['step'] == step_num), {})
        return [name for name in self.list_due_evals(step_num) if METRIC_OF_EVAL[name] not in logged_record]

    def describe_lost_lines(self, resume_step: int) -> list[str]:
        """Describe the lines up to `resume_step` that metrics.jsonl has lost."""
        every_steps = self.spec.log.every_steps
        return [
            *map(
                self.run_dir.format_gap, self.run_dir.find_gaps(self.run_dir.read_records(), every_steps, resume_step)
            )
        ]

    def is_last(self, step_num: int) -> bool:
        return step_num == self.spec.optimizer.steps

    def process_metrics(
        self, step_num: int, metrics: dict[str, jax.Array], train_state: dict | None = None, request: int = NO_REQUEST
    ) -> int:
        """Read the metrics of a step, and evaluate, log, save or stop if that is due.

        Args:
            step_num: The step.
            metrics: Its metrics, on the devices.
            train_state: The state after the step; None if nothing that is due needs it.
            request: Request that is known so far.

        Returns:
            The largest request of all processes, which is the same on all of them.
        """
        self.lease.check()
        self.group.report_progress('step', step_num, self.stopwatch.step_seconds)
        metrics = {name: float(value) for name, value in jax.device_get(metrics).items()}
        request = max(request, int(metrics.pop('wish')))
        if not all(map(math.isfinite, metrics.values())):
            self.checkpointer.delete_if_newest(step_num - 1)  # its parameters gave these metrics
            raise DivergedError(step_num, metrics)
        self.stopwatch.count_step()
        record = {'step': step_num, 'seconds': self.stopwatch.get_total_seconds(), **metrics}
        if is_logged := is_due(step_num, self.spec.log.every_steps):
            tokens = self.spec.optimizer.batch_size * self.spec.data.length
            record['speed/tokens_per_second'] = self.stopwatch.get_steps_per_second() * tokens
            if self.peak_flops:
                record['speed/mfu'] = (
                    self.stopwatch.get_steps_per_second() * flops.count_step_flops(self.spec) / self.peak_flops
                )
            record |= self.data.batches.count_epochs(step_num)
        due_evals = self.list_due_evals(step_num) if train_state else []
        if request <= SAVE_REQUEST:
            record |= self.run_evals(step_num, train_state['params'], due_evals) if due_evals else {}
        self.write_record(record, written=bool(is_logged or due_evals))
        if train_state:
            self.save_or_stop(step_num, train_state, metrics, request)
        if is_logged:
            self.checkpointer.raise_save_error()
            self.warn_of_short_grace()
        if is_logged or train_state:
            self.stopwatch.restart()
        return request

    def save_or_stop(self, step_num: int, train_state: dict, metrics: dict[str, float], request: int) -> None:
        """Save if a save is due or requested, and stop if that is requested."""
        if request or self.is_last(step_num) or is_due(step_num, self.spec.checkpoint.every_steps):
            self.save_checkpoint(step_num, train_state, metrics)
        if request > SAVE_REQUEST:
            self.lease.mark_stopping()
            raise StoppedBySignal(request, step_num)

    def run_evals(self, step_num: int, params: dict, evals: list[str]) -> dict[str, float]:
        """Run the validation and the probe."""
        self.group.report_progress('measuring', step_num)
        metrics = {}
        if 'valid' in evals:
            metrics |= self.evaluate(params, self.data.valid_NT, self.data.find_valid_triggers())
        if 'probe' in evals:
            probe_arrays = self.run_probe(params, self.data.probe_PT)
            self.run_dir.save_probe(
                step_num,
                functools.partial(
                    sink_probe.save_probe, probe_arrays=probe_arrays, setting=sink_probe.get_probe_setting(self.spec)
                ),
            )
            metrics |= sink_probe.compute_probe_metrics(
                probe_arrays, self.spec, self.data.is_trigger(self.data.probe_PT)
            )
        if not all(map(math.isfinite, metrics.values())):
            raise DivergedError(step_num, metrics)
        return metrics

    def write_record(self, record: dict, written: bool) -> None:
        if written:
            self.lease.check()
            self.metrics_writer.append(record)
        for callback in self.callbacks:
            callback.on_record(record, written)

    def log_line(self, line: str) -> None:
        for callback in self.callbacks:
            callback.on_message(line)

    def warn_of_short_grace(self) -> None:
        """Warn once if the work between a stop signal and the end takes longer than the grace period."""
        needed_seconds = (self.checkpointer.save_seconds or 0.0) + MAX_STEPS_TO_STOP * (
            self.stopwatch.step_seconds or 0.0
        )
        if self.checkpointer.save_seconds and needed_seconds > self.grace_seconds and not self.has_warned:
            self.has_warned = True
            self.log_line(
                f'a save and the steps before it take {needed_seconds:.2g} s, and --grace is '
                f'{self.grace_seconds:g} s: a run that is told to stop may be killed before it '
                'is saved; have more time given, and say so by --grace'
            )

    def save_checkpoint(self, step_num: int, train_state: dict, metrics: dict[str, float]) -> None:
        if self.checkpointer.newest_step != step_num:
            self.check_replicas(step_num, train_state, metrics)
            self.group.report_progress('saving', step_num)
            self.metrics_writer.sync()
            self.checkpointer.save(step_num, train_state)
            self.last_save_time = time.monotonic()

    def check_replicas(self, step_num: int, train_state: dict, metrics: dict[str, float]) -> None:
        """Check that all processes have the same data, metrics, and bits of replicated parameters."""
        mismatch = self.find_replica_mismatch(step_num, train_state['params'])
        if self.group.count > 1 and not mismatch:
            local_values = {'the batch': self.data.batches.compute_digest(step_num - 1)}
            local_values |= {name: value.hex() for name, value in metrics.items()}
            mismatch = describe_difference(self.group.gather(f'step {step_num}', local_values))
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


class Prefetcher(Generic[T]):
    """Prefetcher of function(index) for each index, up to `depth` results ahead, in a background thread.

    An error of the function is raised by the call of `get` for the same index.
    """

    def __init__(self, function: Callable[[int], T], indices: Iterable[int], depth: int):
        self.function, self.indices = function, indices
        self.free_slots, self.results, self.is_closed = threading.Semaphore(depth), queue.SimpleQueue(), False
        self.thread = threading.Thread(target=self.run_worker, daemon=True)
        self.thread.start()

    def run_worker(self) -> None:
        for index in self.indices:
            self.free_slots.acquire()
            if self.is_closed:
                return
            try:
                self.results.put((self.function(index), None))
            except BaseException as error:
                self.results.put((None, error))

    def get(self) -> T:
        """Return the next result, which frees a slot."""
        result, error = self.results.get()
        self.free_slots.release()
        if error:
            raise error
        return result

    def close(self) -> None:
        self.is_closed = True
        self.free_slots.release()
        self.thread.join(PREFETCH_CLOSE_SECONDS)


def make_mismatch_finder(
    spec: Spec, mesh: jax.sharding.Mesh, group: ProcessGroup
) -> Callable[[int, dict], str | None]:
    """Make a function (step, params) -> description of a replica that differs, or None."""
    param_shardings = state.get_state_shardings(spec, mesh)['params']
    shapes = state.get_state_shapes(spec)['params']

    def sum_local_bits(params: dict) -> jax.Array:
        """Sum the bits of the shard of each leaf on this device: uint32_1N; a flipped bit changes the sum."""
        bits = (jax.lax.bitcast_convert_type(leaf, jnp.uint32) for leaf in jax.tree.leaves(params))
        return jnp.stack([part.sum(dtype=jnp.uint32) for part in bits])[None]

    param_specs = jax.tree.map(lambda leaf_sharding: leaf_sharding.spec, param_shardings)
    sum_bits = jax.jit(
        jax.shard_map(sum_local_bits, in_specs=(param_specs,), out_specs=PartitionSpec(MESH_AXES), check_vma=False)
    )
    leaves = list(zip(jax.tree_util.tree_leaves_with_path(param_shardings), jax.tree.leaves(shapes), strict=True))
    replica_groups = [
        (jax.tree_util.keystr(path), group_devices_by_shard(leaf_sharding, leaf.shape))
        for (path, leaf_sharding), leaf in leaves
    ]
    if all(len(devices) == 1 for _, device_groups in replica_groups for devices in device_groups):
        return lambda step, params: None

    def find_mismatch(step: int, params: dict) -> str | None:
        local_sums = {
            shard.device.id: np.asarray(shard.data)[0].tolist() for shard in sum_bits(params).addressable_shards
        }
        all_sums = {
            int(name): device_sums
            for process_sums in group.gather(f'copies {step}', local_sums)
            for name, device_sums in process_sums.items()
        }
        for index, (name, groups) in enumerate(replica_groups):
            for first, *others in groups:
                for other in others:
                    if all_sums[first.id][index] != all_sums[other.id][index]:
                        return f'{name} differs on {format_device(first)} and {format_device(other)}'
        return None

    return find_mismatch


def group_devices_by_shard(
    leaf_sharding: jax.sharding.NamedSharding, shape: tuple[int, ...]
) -> list[list[jax.Device]]:
    """Group the devices that hold the same shard of an array."""
    groups: dict[str, list[jax.Device]] = {}
    for device, index in leaf_sharding.devices_indices_map(shape).items():
        groups.setdefault(str(index), []).append(device)
    return list(groups.values())


def format_device(device: jax.Device) -> str:
    return f'device {device.id} of process {device.process_index}'
