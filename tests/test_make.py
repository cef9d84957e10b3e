"""What `make` installs, and what it leaves to jax."""

import importlib.metadata
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PINS = {minor: (ROOT / 'tests' / 'constraints' / f'{minor}.txt').read_text() for minor in ('3.11', '3.12', '3.13')}
with_make = pytest.mark.skipif(shutil.which('make') is None, reason='there is no make here')


def make(*arguments):
    environment = {name: value for name, value in os.environ.items() if name not in ('JAX_PLATFORMS', 'MAKEFLAGS')}
    command = ['make', '--no-print-directory', *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def python(tmp_path):
    """python(minor) -> an interpreter that says it is of that version and does nothing else."""

    def made(minor):
        path = tmp_path / 'python'
        path.write_text(f'#!/bin/sh\necho {minor}\n')
        path.chmod(0o755)
        return f'PYTHON={path}'

    return made


@pytest.mark.parametrize('minor', PINS)
def test_all_that_is_required_is_pinned_to_a_version_that_is_allowed(minor):
    pins = dict(line.split('==') for line in PINS[minor].splitlines())
    required = [Requirement(text) for text in importlib.metadata.requires('sinklab')]
    found = {one: pins[canonicalize_name(one.name)] for one in required if concerns(one)}
    assert len(found) > 20
    assert [f'{one} is pinned to {pin}' for one, pin in found.items() if pin not in one.specifier] == []


def concerns(requirement):
    return not requirement.marker or requirement.marker.evaluate(dict(extra='test'))


@pytest.mark.parametrize('minor', PINS)
def test_pins_are_names_and_versions_alone(minor):
    assert all(re.fullmatch(r'[a-z0-9-]+==[0-9][0-9a-z.+]*', line) for line in PINS[minor].splitlines())


@with_make
@pytest.mark.parametrize('target', ['.venv/uv', '.venv/quickstart', '.venv/test'])
@pytest.mark.parametrize('minor', PINS)
def test_pins_of_ones_python_are_what_is_installed(minor, target, python):
    said = make('-n', '-B', target, python(minor))
    installs = [line for line in said.splitlines() if 'pip install' in line]
    assert installs
    assert all(re.search(f'--constraints? tests/constraints/{minor}.txt ', line) for line in installs)


@with_make
def test_a_python_without_pins_gets_the_newest_versions_and_is_told(python):
    said = make('-n', '-B', '.venv/test', python('3.99'))
    assert 'Python 3.99 has no file in tests/constraints: the newest versions are installed' in said
    assert 'constraint ' not in said
    assert 'constraints ' not in said


@with_make
def test_make_leaves_the_platform_to_jax():
    assert make('--eval=shown: ; @echo "<$$JAX_PLATFORMS>"', 'shown') == '<>\n'
