"""Warm starts: a run that begins from a checkpoint of another run (a warm start)."""

import dataclasses
from pathlib import Path
from typing import Any

import jax

from sinklab.checkpoint.checkpointer import find_damage_on_all, load_state, read_metadata
from sinklab.config.differences import flatten_dict, format_differences
from sinklab.config.spec import Spec, WarmStartTakes
from sinklab.errors import UserError
from sinklab.process_group import ProcessGroup, broadcast_from_primary, check_equal_on_all
from sinklab.run_dir import RunDir, format_run_ref
from sinklab.storage.paths import make_absolute, make_relative, resolve_path
from sinklab.train import state

DATA_ORDER_FIELDS = ('data.', 'optimizer.batch_size ')  # fields that determine which tokens a step reads


@dataclasses.dataclass(frozen=True)
class WarmStart:
    """A checkpoint that a run starts from, and what it takes: `params`, or all of the train state."""

    run_dir: RunDir
    step: int
    spec: Spec
    takes: WarmStartTakes = ''

    def __str__(self) -> str:
        return f'--from={format_run_ref(self.takes, self.run_dir, self.step)}'

    @property
    def takes_all(self) -> bool:
        """Return whether the run takes the whole state, and begins at the checkpoint's step in the same data."""
        return not self.takes

    @property
    def state_keys(self) -> tuple[str, ...]:
        return ('step', 'params', 'opt_state') if self.takes_all else ('params',)

    @property
    def start_step(self) -> int:
        """The step after which the warm start begins."""
        return self.step if self.takes_all else 0


def check_warm_start(parent: WarmStart | None, spec: Spec, run_dir: RunDir, group: ProcessGroup) -> None:
    """Raise UserError, before data is read, if a new run cannot start from its parent."""
    check_equal_on_all(group, {'the step of --from': parent and parent.step})  # None if a process does not see it
    if broadcast_from_primary(group, lambda: parent is not None and not run_dir.has_run()):
        broadcast_from_primary(group, lambda: check_compatible_spec(parent, spec))
        verify_parent(parent, group)
        broadcast_from_primary(group, lambda: check_state_keys(parent))


def check_state_keys(parent: WarmStart) -> None:
    """Raise UserError if a checkpoint, such as that of an imported model, lacks a key that is taken."""
    if missing_keys := set(parent.state_keys) - read_metadata(get_checkpoint_path(parent)).metadata.keys():
        params_option = format_run_ref('params', parent.run_dir, parent.step)
        raise UserError(
            f'{get_checkpoint_path(parent)} contains no {min(missing_keys)}, which {parent} needs; '
            f'give --from={params_option}'
        )


def check_compatible_spec(parent: WarmStart, spec: Spec) -> None:
    """Raise UserError if the state of the parent does not fit this spec."""
    if (steps := spec.optimizer.steps) <= parent.start_step:
        raise UserError(f'{parent} leaves no step to train with config.optimizer.steps={steps}; increase it')
    parent_fields = flatten_spec(parent.spec)
    new_fields = flatten_spec(spec)
    # Token ids of another task have other meanings, and optimizers have other states.
    for name in ('data.task', 'optimizer.name') if parent.takes_all else ('data.task',):
        if parent_fields[name] != new_fields[name]:
            raise UserError(
                f'config.{name} is {parent_fields[name]} in {parent} and {new_fields[name]} here; '
                'a warm start cannot change it'
            )
    parent_shapes = get_parameter_shapes(parent.spec)
    new_shapes = get_parameter_shapes(spec)
    for name in parent_shapes:
        if new_shapes.get(name, parent_shapes[name]) != parent_shapes[name]:
            raise UserError(
                f'{name} has the shape {parent_shapes[name]} in {parent} and {new_shapes[name]} here '
                f'({"; ".join(format_differences(parent_fields, new_fields))}); a warm start cannot change the '
                'shape of a parameter'
            )


def verify_parent(parent: WarmStart, group: ProcessGroup) -> None:
    """Raise UserError if the checkpoint of the parent is damaged."""
    if damage := find_damage_on_all(get_checkpoint_path(parent), group):
        raise UserError(f'{get_checkpoint_path(parent)} is damaged: {damage}; give another step of {parent.run_dir}')


def describe_parent(parent: WarmStart, spec: Spec, run_dir: RunDir, data_fingerprint: dict[str, str | int]) -> dict:
    """Return the parent in row.json of a warm start that reads this data."""
    changes = format_differences(flatten_spec(parent.spec), flatten_spec(spec))
    parent_shapes = get_parameter_shapes(parent.spec)
    new_shapes = get_parameter_shapes(spec)
    mode_fields = {} if parent.takes_all else dict(takes=parent.takes, start=parent.start_step)
    return dict(
        run=make_relative(resolve_path(parent.run_dir.path), resolve_path(run_dir.path)),
        step=parent.step,
        row=parent.run_dir.read_json('row').get('row') or parent.run_dir.path.name,
        commit=parent.run_dir.read_environment().get('commit'),
        config=changes,
        new=[name for name in new_shapes if name not in parent_shapes],
        dropped=[name for name in parent_shapes if name not in new_shapes],
        data=find_data_differences(parent, changes, data_fingerprint),
        **mode_fields,
    )


def find_data_differences(parent: WarmStart, changes: list[str], data_fingerprint: dict[str, str | int]) -> list[str]:
    """Return how the data of a warm start differs from that of its parent, as far as the config allows it.

    A warm start that does not continue in the data of its parent may always have other data. Any may read the same
    data in another order, as after an update of grain.

    Raises:
        UserError: The tokenizer differs, or other data is not allowed.
    """
    parent_data = read_metadata(get_checkpoint_path(parent)).custom_metadata['data']
    new_data = {name: data_fingerprint.get(name) for name in parent_data}  # an imported model has few of these fields
    data_differences = format_differences(parent_data, new_data | {'order': parent_data.get('order')})
    if parent_data.get('tokenizer') != data_fingerprint.get('tokenizer'):
        raise UserError(
            f'{parent} has another tokenizer ({"; ".join(data_differences)}), with other token ids than this data; '
            'give --config.data.tokenizer=FILE, the tokenizer.json of its token store'
        )
    changes_order = any(change.startswith(DATA_ORDER_FIELDS) for change in changes)
    if data_differences and parent.takes_all and not changes_order:
        raise UserError(f'{parent} was trained on other data ({"; ".join(data_differences)}); restore that data')
    return data_differences or format_differences(parent_data, new_data)


def require_parent(parent: WarmStart | None, run_dir: RunDir, recorded: dict) -> WarmStart:
    """Return the parent of a run without a checkpoint; raise UserError if none is given."""
    if parent is None:
        parent_ref = format_run_ref(recorded.get('takes', ''), recorded['run'], recorded['step'])
        raise UserError(f'{run_dir} has no checkpoint and starts from {parent_ref}; give --from again')
    return parent


def load_parent_state(parent: WarmStart, spec: Spec, mesh: jax.sharding.Mesh) -> dict:
    """Load the leaves that are taken from a verified parent, by name; initialize all others."""
    abstract_parent = state.make_abstract_state(parent.spec, mesh)
    abstract_parts = {name: abstract_parent[name] for name in parent.state_keys}
    loaded_state = load_state(get_checkpoint_path(parent), abstract_parts, partial_load=not parent.takes_all)
    loaded_leaves = state.flatten_by_name(loaded_state)
    abstract_state = state.make_abstract_state(spec, mesh)
    new_shardings = {
        name: leaf.sharding
        for name, leaf in state.flatten_by_name(abstract_state).items()
        if name not in loaded_leaves
    }
    all_leaves = loaded_leaves | init_new_leaves(spec, mesh, new_shardings)
    return jax.tree_util.tree_map_with_path(lambda path, _: all_leaves[state.format_path(path)], abstract_state)


def init_new_leaves(
    spec: Spec, mesh: jax.sharding.Mesh, shardings: dict[str, jax.sharding.NamedSharding]
) -> dict[str, jax.Array]:
    """Initialize the named leaves alone, without memory for the others."""
    if not shardings:
        return {}

    def make_leaves() -> dict[str, jax.Array]:
        initial_leaves = state.flatten_by_name(state.init_state(spec))
        return {name: initial_leaves[name] for name in shardings}

    options = state.INIT_COMPILER_OPTIONS.get(mesh.devices.flat[0].platform)
    return jax.jit(make_leaves, out_shardings=shardings, compiler_options=options)()


def flatten_spec(spec: Spec) -> dict[str, Any]:
    return flatten_dict(dataclasses.asdict(spec))


def get_parameter_shapes(spec: Spec) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter by its name."""
    leaves = state.flatten_by_name(state.get_state_shapes(spec)['params'])
    return {name: leaf.shape for name, leaf in leaves.items()}


def get_checkpoint_path(parent: WarmStart) -> Path:
    return make_absolute(parent.run_dir.checkpoint_dir / str(parent.step))
