"""XLA flags of launch profiles, checked with the compilers."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from launch.xla_flags import PROFILES
from sinklab.planning import topology

ROOT = Path(__file__).parents[1]
UNKNOWN_FLAG = '--xla_no_such_flag=true'
FUSION_FLAGS = '--xla_tpu_enable_async_collective_fusion_fuse_all_gather=true --xla_enable_async_all_gather=true'
# The compiler rejects some known flags for a chip only when it compiles for that chip.
COMPILE_CODE = """
import jax
from sinklab.planning import topology
for name in ('v4:2x2x1', 'v5e:2x2', 'v5p:2x2x1', 'v6e:2x2'):
    place = jax.sharding.SingleDeviceSharding(topology.parse_topology(name)[1][0])
    jax.jit(jax.numpy.sin).lower(jax.ShapeDtypeStruct((8, 128), 'float32', sharding=place)).compile()
"""
# Environment variable -> code that reads it.
READER_CODE = {
    'LIBTPU_INIT_ARGS': COMPILE_CODE,
    'XLA_FLAGS': "import jax; jax.devices('cpu')",
}
PROFILE_FLAGS = [(name, *item) for name, values in PROFILES.items() for item in values.items()]


def accepts_flags(variable, value):
    if variable == 'LIBTPU_INIT_ARGS' and topology.find_libtpu() is None:
        pytest.skip('libtpu, which has the compiler, could not be installed; pip install libtpu')
    environment = {**os.environ, 'XLA_FLAGS': '', variable: value, 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(ROOT)}
    process = subprocess.run(
        [sys.executable, '-c', READER_CODE[variable]], env=environment, capture_output=True, text=True
    )
    assert process.returncode == 0 or re.search('flag|FAILED_PRECONDITION', process.stderr, re.IGNORECASE), (
        process.stderr
    )
    return process.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize(('name', 'variable', 'value'), PROFILE_FLAGS, ids=[name for name, *_ in PROFILE_FLAGS])
def test_profile_flags_are_accepted_for_every_chip(name, variable, value):
    assert accepts_flags(variable, value)


@pytest.mark.slow
@pytest.mark.parametrize('variable', READER_CODE)
def test_unknown_flag_is_rejected(variable):
    assert not accepts_flags(variable, UNKNOWN_FLAG)


@pytest.mark.slow
def test_flag_unsupported_by_some_chip_is_rejected():
    assert not accepts_flags('LIBTPU_INIT_ARGS', FUSION_FLAGS)


def test_profiles_set_exactly_variables_with_readers():
    assert {variable for _, variable, _ in PROFILE_FLAGS} == set(READER_CODE)
