"""Profiles of compiler flags: names that the compilers know."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch.flags import PROFILES
from sinklab import topology

ROOT = Path(__file__).parents[1]
UNKNOWN = '--xla_no_such_flag=true'
# A variable -> what reads it.
READERS = {
    'LIBTPU_INIT_ARGS': "from sinklab import topology; topology.devices('v5e:2x2')",
    'XLA_FLAGS': "import jax; jax.devices('cpu')",
}
GIVEN = [(name, *item) for name, values in PROFILES.items() for item in values.items()]


def accepted(variable, value):
    if variable == 'LIBTPU_INIT_ARGS' and topology.library() is None:
        pytest.skip('libtpu, which has the compiler, could not be installed; pip install libtpu')
    environment = {**os.environ, 'XLA_FLAGS': '', variable: value, 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(ROOT)}
    said = subprocess.run([sys.executable, '-c', READERS[variable]], env=environment, capture_output=True, text=True)
    assert said.returncode == 0 or 'flag' in said.stderr.lower(), said.stderr
    return said.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize(('name', 'variable', 'value'), GIVEN, ids=[name for name, *_ in GIVEN])
def test_the_flags_of_a_profile_are_known(name, variable, value):
    assert accepted(variable, value)


@pytest.mark.slow
@pytest.mark.parametrize('variable', READERS)
def test_a_flag_that_is_unknown_is_refused(variable):
    assert not accepted(variable, UNKNOWN)


def test_profiles_set_what_is_read():
    assert {variable for _, variable, _ in GIVEN} == set(READERS)
