"""One run in every layout of eight devices, with equal losses, gradients and parameters."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import make_case_params

HERE = Path(__file__).parent
MESHES = [(8, 1, 1), (1, 8, 1), (2, 4, 1), (2, 2, 2)]
REMATS = 'none', 'full', 'attention,ffn', 'qkv,middle'
UNITS = dict(float32=2.0**-24, bfloat16=2.0**-8)  # relative error of a rounding
pytestmark = pytest.mark.slow


def case(mesh, dtype, **more):
    return dict(hardware=dict(zip(('data', 'fsdp', 'tensor'), mesh, strict=True), **more), dtype=dtype)


def cases():
    """Return cases of each mesh: plain, with micro-batches and remat, and resumed from another mesh."""
    found = {}
    for dtype in UNITS:
        found[f'alone {dtype}'] = case((1, 1, 1), dtype)
        for (number, mesh), remat in zip(enumerate(MESHES), REMATS, strict=True):
            found[f'{mesh} {dtype}'] = case(mesh, dtype)
            found[f'{mesh} {dtype} micro'] = case(mesh, dtype, micro_batch=8, remat=remat)
            other = MESHES[number - 1 if number else 1]
            found[f'{mesh} {dtype} resumed'] = case(mesh, dtype) | {'from': f'{other} {dtype}'}
    late = [name for name in found if name.endswith('resumed')]
    return {name: found[name] for name in sorted(found, key=late.__contains__)}


CASES = cases()
# Every mesh in float32; other kinds of cases on meshes that divide both parameters and batches.
SAMPLED = [f'{mesh} float32' for mesh in MESHES]
SAMPLED += ['(2, 2, 2) float32 micro', '(2, 2, 2) float32 resumed', '(2, 4, 1) bfloat16 micro']
ALONE = [name for name in CASES if name.startswith('alone')]


@pytest.fixture(scope='module')
def runs(request, tmp_path_factory):
    """Return the results of the cases whose tests are selected, by name."""
    asked = {item.callspec.params.get('name') for item in request.session.items if item.path == request.path}
    needed = {*ALONE, *SAMPLED, *(asked - {None})}
    needed |= {CASES[name]['from'] for name in needed if 'from' in CASES[name]}
    chosen = {name: given for name, given in CASES.items() if name in needed}
    folder = tmp_path_factory.mktemp('layouts')
    command = [sys.executable, str(HERE / 'eight_devices.py'), str(folder), json.dumps(chosen)]
    subprocess.run(command, check=True, timeout=900, env={**os.environ, 'PYTHONPATH': f'{HERE.parent}:{HERE}'})
    return {name: dict(np.load(folder / f'{name}.npz')) for name in chosen}


def error(ours, theirs):
    """Return the norm of the difference relative to the norm of the array."""
    return np.linalg.norm(np.float64(ours) - theirs) / np.linalg.norm(theirs)


@pytest.mark.parametrize('name', make_case_params([name for name in CASES if name not in ALONE], SAMPLED))
def test_layout_does_not_change_loss_gradient_or_parameters(runs, name):
    """Allow for another order of some hundred addends in float32; in bfloat16 the same values are rounded.

    With tensor parallelism, parts are rounded before they are added. This may add as much error as one device has.
    """
    dtype = CASES[name]['dtype']
    found, alone, exact = runs[name], runs[f'alone {dtype}'], runs['alone float32']
    for key in alone:
        if key.endswith('on each'):
            continue
        allowed = dict(float32=16, bfloat16=1 / 8)[dtype] * UNITS[dtype]
        if dtype == 'bfloat16' and CASES[name]['hardware']['tensor'] > 1:
            assert error(found[key], exact[key]) < 2**0.5 * max(error(alone[key], exact[key]), UNITS[dtype]), key
        else:
            assert error(found[key], alone[key]) < allowed, key


@pytest.mark.parametrize('mesh', MESHES, ids=str)
def test_optimizer_moments_are_sharded_like_parameters(runs, mesh):
    found, (_, fsdp, tensor) = runs[f'{mesh} float32'], mesh
    for name in found:
        if name.startswith('params.') and not name.endswith('on each'):
            momentum = name.replace('params.', 'momentum.')
            assert found[f'{momentum} on each'] == found[f'{name} on each']
            ways = found[name].size / found[f'{name} on each']
            assert ways == (1 if name.endswith('gain_D') else fsdp * tensor), f'{name} is divided by {ways}'
