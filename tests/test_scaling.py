"""How costs grow: exact counts of compiled programs, and the page of benchmarks/scaling.py."""

import json

import jax
import pytest
from conftest import make_tiny_spec

from docs import page_parts, scaling_results
from sinklab.config.spec import Hardware
from sinklab.parallel import device_mesh
from sinklab.train import state, step


def lower_train_step(**changes):
    spec, hardware = make_tiny_spec(**changes), Hardware(remat='attention,ffn')
    mesh = device_mesh.make_mesh(hardware, jax.devices()[:1])
    with jax.set_mesh(mesh):
        inputs = step.make_abstract_inputs(spec, mesh)
        return step.make_train_step(spec, hardware, mesh).lower(state.make_abstract_state(spec, mesh), *inputs)


def test_slope_of_power_law_is_its_exponent():
    values = [1, 3, 10, 40]
    assert scaling_results.fit_slope(values, [7 * value**1.5 for value in values]) == pytest.approx(1.5)


def make_axes(measured, expected=1.0, values=(1, 10, 100), name='report, s'):
    slope = scaling_results.fit_slope(values, measured)
    cost = dict(measured=list(measured), slope=slope, expected=expected)
    return {'runs': dict(values=list(values), costs={name: cost})}


@pytest.mark.parametrize(
    ('measured', 'num_problems'),
    [
        ((1, 1, 1), 0),
        ((2, 2, 2), 0),  # another machine
        ((1, 1.2, 1.4), 0),
        ((1, 1, 1.6), 1),  # grows at the end
        ((1, 10, 100), 1),  # linear instead of constant, although theory allows that
    ],
)
def test_growth_above_that_of_recorded_results_is_named(measured, num_problems):
    problems = scaling_results.find_regressions(make_axes(measured), make_axes((1, 1, 1)))
    assert len(problems) == num_problems
    assert all('report, s' in problem and 'runs' in problem for problem in problems)


def test_constant_cost_is_no_regression_from_recorded_cost_that_falls():
    assert scaling_results.find_regressions(make_axes((1, 1, 1)), make_axes((1, 1, 0.1))) == []


@pytest.mark.parametrize('changes', [dict(values=(1, 10, 1000)), dict(name='sweep, s')])
def test_axis_with_other_values_or_costs_than_recorded_is_named(changes):
    problems = scaling_results.find_regressions(make_axes((1, 1, 1), **changes), make_axes((1, 1, 1)))
    assert len(problems) == 1


def test_slope_above_theory_is_marked_on_page():
    results = dict(date='', machine='', versions='', repeat=1)
    assert '| above |' in scaling_results.format_page_part(results | dict(axes=make_axes((1, 30, 900))))
    assert '| above |' not in scaling_results.format_page_part(results | dict(axes=make_axes((1, 5, 25))))


def test_page_matches_json():
    page = scaling_results.PAGE.read_text(encoding='utf-8')
    part = scaling_results.format_page_part(scaling_results.read_results())
    assert page_parts.replace_part(page, scaling_results.PAGE_PART, part) == page


def test_slopes_in_json_are_those_of_its_costs():
    axes = json.loads(scaling_results.RESULTS_FILE.read_text(encoding='utf-8'))['axes']
    for axis in axes.values():
        for entry in axis['costs'].values():
            assert scaling_results.fit_slope(axis['values'], entry['measured']) == pytest.approx(
                entry['slope'], abs=0.01
            )


def test_train_step_has_as_many_operations_for_more_layers():
    """Layers are scanned, so that compilation does not take longer for deeper models."""
    programs = [lower_train_step(model__layers=layers).as_text() for layers in (2, 7)]
    counts = [program.count(' = ') for program in programs]
    assert counts[0] == counts[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ('name', 'values'), [('data__length', (256, 1024, 4096)), ('optimizer__batch_size', (4, 16, 64))]
)
def test_memory_of_train_step_grows_at_most_linearly(name, values):
    sizes = [lower_train_step(**{name: value}).compile().memory_analysis().temp_size_in_bytes for value in values]
    for value, size in zip(values, sizes, strict=True):
        assert size / sizes[0] <= value / values[0]
