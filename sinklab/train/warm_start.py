"""Warm starts: a run that begins from a checkpoint of another run (a fork)."""

import dataclasses
from pathlib import Path
from typing import Any

import jax

from sinklab.checkpoint.checkpointer import find_damage_on_all, load_state, read_metadata
from sinklab.config.differences import flatten_dict, format_differences
from sinklab.config.spec import Spec, WarmStartTakes
from sinklab.errors import UserError
from sinklab.process_group import ProcessGroup, broadcast_from_primary, check_equal_on_all
from sinklab.run_dir import RunDir
from sinklab.run_ref import format_run_ref
from sinklab.storage.paths import make_absolute, make_relative, resolve_path
from sinklab.train import state

DATA_ORDER_FIELDS = ('data.', 'optimizer.batch_size ')  # fields that determine which tokens a step reads


@dataclasses.dataclass(frozen=True)
class WarmStart:
    """A checkpoint that a fork starts from, and what it takes: `params`, or all of the train state."""

    run_dir: RunDir
    step: int
    spec: Spec
    takes: WarmStartTakes = ''

    def __str__(self) -> str:
        return f'--from={format_run_ref(self.takes, self.run_dir, self.step)}'

    @property
    def takes_all(self) -> bool:
        """Whether the fork takes the whole state, so that it begins at the checkpoint's step, in the same data."""
        return not self.takes

    @property
    def state_keys(self) -> tuple[str, ...]:
        return ('step', 'params', 'opt_state') if self.takes_all else ('params',)

    @property
    def fixed_fields(self) -> tuple[str, ...]:
        """Fields of the config that must not change; token ids of another task have other meanings."""
        return ('data.task', 'optimizer.name') if self.takes_all else ('data.task',)

    @property
    def start_step(self) -> int:
        """The step after which the fork begins."""
        return self.step if self.takes_all else 0


def check_warm_start(origin: WarmStart | None, spec: Spec, run_dir: RunDir, group: ProcessGroup) -> None:
    """Raise UserError, before data is read, if a new run cannot start from its origin."""
    check_equal_on_all(group, {'the step of --from': origin and origin.step})  # None if a process does not see it
    if broadcast_from_primary(group, lambda: origin is not None and not run_dir.has_run()):
        broadcast_from_primary(group, lambda: check_compatible_spec(origin, spec))
        verify_origin(origin, group)
        broadcast_from_primary(group, lambda: check_state_keys(origin))


def check_state_keys(origin: WarmStart) -> None:
    """Raise UserError if a checkpoint, such as that of an imported model, lacks a key that is taken."""
    if missing_keys := set(origin.state_keys) - read_metadata(get_checkpoint_path(origin)).metadata.keys():
        params_option = format_run_ref('params', origin.run_dir, origin.step)
        raise UserError(
            f'{get_checkpoint_path(origin)} contains no {min(missing_keys)}, which {origin} needs; '
            f'give --from={params_option}'
        )


def check_compatible_spec(origin: WarmStart, spec: Spec) -> None:
    """Raise UserError if the state of the origin does not fit this spec."""
    if (steps := spec.optimizer.steps) <= origin.start_step:
        raise UserError(f'{origin} leaves no step to train with config.optimizer.steps={steps}; increase it')
    origin_fields, new_fields = flatten_spec(origin.spec), flatten_spec(spec)
    for name in origin.fixed_fields:
        if origin_fields[name] != new_fields[name]:
            raise UserError(
                f'config.{name} is {origin_fields[name]} in {origin} and {new_fields[name]} here; '
                'a fork cannot change it'
            )
    origin_shapes, new_shapes = get_parameter_shapes(origin.spec), get_parameter_shapes(spec)
    for name in origin_shapes:
        if new_shapes.get(name, origin_shapes[name]) != origin_shapes[name]:
            raise UserError(
                f'{name} has the shape {origin_shapes[name]} in {origin} and {new_shapes[name]} here '
                f'({"; ".join(format_differences(origin_fields, new_fields))}); a fork cannot change the '
                'shape of a parameter'
            )


def verify_origin(origin: WarmStart, group: ProcessGroup) -> None:
    """Raise UserError if the checkpoint of the origin is damaged."""
    if damage := find_damage_on_all(get_checkpoint_path(origin), group):
        other_steps = [step for step in origin.run_dir.list_checkpoint_steps() if step != origin.step]
        raise UserError(
            f'{get_checkpoint_path(origin)} is damaged: {damage}; give another step of {origin.run_dir}'
            f'{f" ({other_steps})" if other_steps else ""}'
        )


def describe_lineage(origin: WarmStart, spec: Spec, run_dir: RunDir, data_fingerprint: dict[str, str | int]) -> dict:
    """Return the lineage in row.json of a fork that reads this data."""
    changes = format_differences(flatten_spec(origin.spec), flatten_spec(spec))
    origin_shapes = get_parameter_shapes(origin.spec)
    new_shapes = get_parameter_shapes(spec)
    mode_fields = {} if origin.takes_all else dict(takes=origin.takes, start=origin.start_step)
    return dict(
        run=make_relative(resolve_path(origin.run_dir.path), resolve_path(run_dir.path)),
        step=origin.step,
        row=origin.run_dir.read_json('row').get('row') or origin.run_dir.path.name,
        commit=origin.run_dir.read_environment().get('commit'),
        config=changes,
        new=[name for name in new_shapes if name not in origin_shapes],
        dropped=[name for name in origin_shapes if name not in new_shapes],
        data=find_data_differences(origin, changes, data_fingerprint),
        **mode_fields,
    )


def find_data_differences(origin: WarmStart, changes: list[str], data_fingerprint: dict[str, str | int]) -> list[str]:
    """Return how the data of a fork differs from that of its origin, as far as the config allows it.

    A fork that does not continue in the data of its origin may always have other data. Any fork may read the same
    data in another order, as after an update of grain.

    Raises:
        UserError: The tokenizer differs, or other data is not allowed.
    """
    origin_data = read_metadata(get_checkpoint_path(origin)).custom_metadata['data']
    new_data = {name: data_fingerprint.get(name) for name in origin_data}  # an imported model has few of these fields
    data_differences = format_differences(origin_data, new_data | {'order': origin_data.get('order')})
    if origin_data.get('tokenizer') != data_fingerprint.get('tokenizer'):
        raise UserError(
            f'{origin} has another tokenizer ({"; ".join(data_differences)}), with other token ids than this data; '
            'give --config.data.tokenizer=FILE, the tokenizer.json of its token store'
        )
    changes_order = any(change.startswith(DATA_ORDER_FIELDS) for change in changes)
    if data_differences and origin.takes_all and not changes_order:
        raise UserError(f'{origin} was trained on other data ({"; ".join(data_differences)}); restore that data')
    return data_differences or format_differences(origin_data, new_data)


def require_origin(origin: WarmStart | None, run_dir: RunDir, lineage: dict) -> None:
    """Raise UserError if a fork has no checkpoint, and no origin is given."""
    if origin is None:
        parent = format_run_ref(lineage.get('takes', ''), lineage['run'], lineage['step'])
        raise UserError(f'{run_dir} has no checkpoint and starts from {parent}; give --from again')


def load_origin_state(origin: WarmStart, spec: Spec, mesh: jax.sharding.Mesh) -> dict:
    """Load the leaves that are taken from a verified origin, by path; initialize all others."""
    abstract_origin = state.make_abstract_state(origin.spec, mesh)
    abstract_parts = {name: abstract_origin[name] for name in origin.state_keys}
    loaded_state = load_state(get_checkpoint_path(origin), abstract_parts, partial_load=not origin.takes_all)
    loaded_leaves = flatten_by_path(loaded_state)
    abstract_state = state.make_abstract_state(spec, mesh)
    new_shardings = {
        name: leaf.sharding for name, leaf in flatten_by_path(abstract_state).items() if name not in loaded_leaves
    }
    all_leaves = loaded_leaves | init_new_leaves(spec, mesh, new_shardings)
    return jax.tree_util.tree_map_with_path(
        lambda key_path, _: all_leaves[jax.tree_util.keystr(key_path)], abstract_state
    )


def init_new_leaves(
    spec: Spec, mesh: jax.sharding.Mesh, shardings: dict[str, jax.sharding.NamedSharding]
) -> dict[str, jax.Array]:
    """Initialize leaves that are not taken from the origin, by path."""
    if not shardings:
        return {}

    def make_leaves() -> dict:
        initial_leaves = flatten_by_path(state.init_state(spec))
        return {name: initial_leaves[name] for name in shardings}

    options = state.INIT_COMPILER_OPTIONS.get(mesh.devices.flat[0].platform)
    return jax.jit(make_leaves, out_shardings=shardings, compiler_options=options)()


def flatten_by_path(tree: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(key_path): leaf for key_path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def flatten_spec(spec: Spec) -> dict[str, Any]:
    return flatten_dict(dataclasses.asdict(spec))


def get_parameter_shapes(spec: Spec) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter by its name."""
    leaves_with_path = jax.tree_util.tree_leaves_with_path(state.get_state_shapes(spec)['params'])
    return {'.'.join(map(str, state.get_name_path(key_path))): leaf.shape for key_path, leaf in leaves_with_path}


def get_checkpoint_path(origin: WarmStart) -> Path:
    return make_absolute(origin.run_dir.checkpoint_dir / str(origin.step))
