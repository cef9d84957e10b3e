"""One run in every layout of eight devices, with equal losses, gradients and parameters."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import make_case_params

TESTS_FOLDER = Path(__file__).parent
MESHES = [(8, 1, 1), (1, 8, 1), (2, 4, 1), (2, 2, 2)]
REMATS = 'none', 'full', 'attention,ffn', 'qkv,middle'
ROUNDING_ERRORS = dict(float32=2.0**-24, bfloat16=2.0**-8)  # relative error of a rounding
pytestmark = pytest.mark.slow


def make_case(mesh, dtype, **options):
    return dict(hardware=dict(zip(('data', 'fsdp', 'tensor'), mesh, strict=True), **options), dtype=dtype)


def make_cases():
    """Return cases of each mesh: plain, with micro-batches and remat, and resumed from another mesh."""
    cases = {}
    for dtype in ROUNDING_ERRORS:
        cases[f'alone {dtype}'] = make_case((1, 1, 1), dtype)
        for (index, mesh), remat in zip(enumerate(MESHES), REMATS, strict=True):
            cases[f'{mesh} {dtype}'] = make_case(mesh, dtype)
            cases[f'{mesh} {dtype} micro'] = make_case(mesh, dtype, micro_batch=8, remat=remat)
            other_mesh = MESHES[index - 1 if index else 1]
            cases[f'{mesh} {dtype} resumed'] = make_case(mesh, dtype) | {'from': f'{other_mesh} {dtype}'}
    resumed_names = [name for name in cases if name.endswith('resumed')]
    return {name: cases[name] for name in sorted(cases, key=resumed_names.__contains__)}


CASES = make_cases()
# Every mesh in float32; other kinds of cases on meshes that divide both parameters and batches.
SAMPLED_NAMES = [f'{mesh} float32' for mesh in MESHES]
SAMPLED_NAMES += ['(2, 2, 2) float32 micro', '(2, 2, 2) float32 resumed', '(2, 4, 1) bfloat16 micro']
SINGLE_DEVICE_NAMES = [name for name in CASES if name.startswith('alone')]


@pytest.fixture(scope='module')
def runs(request, tmp_path_factory):
    """Return the results of the cases whose tests are selected, by name."""
    selected_names = {item.callspec.params.get('name') for item in request.session.items if item.path == request.path}
    needed_names = {*SINGLE_DEVICE_NAMES, *SAMPLED_NAMES, *(selected_names - {None})}
    needed_names |= {CASES[name]['from'] for name in needed_names if 'from' in CASES[name]}
    needed_cases = {name: case for name, case in CASES.items() if name in needed_names}
    folder = tmp_path_factory.mktemp('layouts')
    command = [sys.executable, str(TESTS_FOLDER / 'eight_devices.py'), str(folder), json.dumps(needed_cases)]
    subprocess.run(
        command, check=True, timeout=900, env={**os.environ, 'PYTHONPATH': f'{TESTS_FOLDER.parent}:{TESTS_FOLDER}'}
    )
    return {name: dict(np.load(folder / f'{name}.npz')) for name in needed_cases}


def compute_relative_error(actual, expected):
    """Return the norm of the difference relative to the norm of the array."""
    return np.linalg.norm(np.float64(actual) - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize(
    'name', make_case_params([name for name in CASES if name not in SINGLE_DEVICE_NAMES], SAMPLED_NAMES)
)
def test_layout_does_not_change_loss_gradient_or_parameters(runs, name):
    """Allow for another order of some hundred addends in float32; in bfloat16 the same values are rounded.

    With tensor parallelism, parts are rounded before they are added. This may add as much error as one device has.
    """
    dtype = CASES[name]['dtype']
    actual, single_device, exact = runs[name], runs[f'alone {dtype}'], runs['alone float32']
    for key in single_device:
        if key.endswith('on each'):
            continue
        tolerance = dict(float32=16, bfloat16=1 / 8)[dtype] * ROUNDING_ERRORS[dtype]
        if dtype == 'bfloat16' and CASES[name]['hardware']['tensor'] > 1:
            assert compute_relative_error(actual[key], exact[key]) < 2**0.5 * max(
                compute_relative_error(single_device[key], exact[key]), ROUNDING_ERRORS[dtype]
            ), key
        else:
            assert compute_relative_error(actual[key], single_device[key]) < tolerance, key


@pytest.mark.parametrize('mesh', MESHES, ids=str)
def test_optimizer_moments_are_sharded_like_parameters(runs, mesh):
    arrays, (_, fsdp, tensor) = runs[f'{mesh} float32'], mesh
    for name in arrays:
        if name.startswith('params.') and not name.endswith('on each'):
            momentum = name.replace('params.', 'momentum.')
            assert arrays[f'{momentum} on each'] == arrays[f'{name} on each']
            num_parts = arrays[name].size / arrays[f'{name} on each']
            assert num_parts == (1 if name.endswith('gain_D') else fsdp * tensor), f'{name} is divided by {num_parts}'
