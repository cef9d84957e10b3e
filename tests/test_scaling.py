"""How costs grow: exact counts of compiled programs."""

import jax
import pytest
from tiny_specs import make_tiny_spec

from sinklab.config.spec import Layout
from sinklab.parallel import device_mesh
from sinklab.train import state, step


def lower_train_step(**changes):
    spec, layout = make_tiny_spec(**changes), Layout(remat='attention,ffn')
    mesh = device_mesh.make_mesh(layout, jax.devices()[:1])
    with jax.set_mesh(mesh):
        inputs = step.make_abstract_inputs(spec, mesh)
        return step.make_train_step(spec, layout, mesh).lower(state.make_abstract_state(spec, mesh), *inputs)


def test_train_step_has_as_many_operations_for_more_layers():
    """Layers are scanned, so that compilation does not take longer for deeper models."""
    programs = [lower_train_step(model__layers=layers).as_text() for layers in (2, 7)]
    counts = [program.count(' = ') for program in programs]
    assert counts[0] == counts[1]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ('name', 'values'), [('data__length', (256, 1024, 4096)), ('optimizer__batch_size', (4, 16, 64))]
)
def test_memory_of_train_step_grows_at_most_linearly(name, values):
    sizes = [lower_train_step(**{name: value}).compile().memory_analysis().temp_size_in_bytes for value in values]
    for value, size in zip(values, sizes, strict=True):
        assert size / sizes[0] <= value / values[0]
