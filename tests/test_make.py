"""Tests of the Makefile and of pinned versions."""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import sinklab

ROOT = Path(__file__).parents[1]
PINS = {minor: (ROOT / 'tests' / 'constraints' / f'{minor}.txt').read_text() for minor in ('3.11', '3.12', '3.13')}
with_make = pytest.mark.skipif(shutil.which('make') is None, reason='there is no make here')


def make(*arguments):
    environment = {name: value for name, value in os.environ.items() if name not in ('JAX_PLATFORMS', 'MAKEFLAGS')}
    command = ['make', '--no-print-directory', *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def python(tmp_path):
    """Return python(minor) -> a stub interpreter that prints only its version."""

    def made(minor):
        path = tmp_path / 'python'
        path.write_text(f'#!/bin/sh\necho {minor}\n')
        path.chmod(0o755)
        return f'PYTHON={path}'

    return made


@pytest.mark.parametrize('minor', PINS)
def test_requirements_are_pinned_to_allowed_versions(minor):
    pins = dict(line.split('==') for line in PINS[minor].splitlines())
    required = [Requirement(text) for text in importlib.metadata.requires('sinklab')]
    found = {one: pins[canonicalize_name(one.name)] for one in required if concerns(one)}
    assert len(found) > 20
    assert [f'{one} is pinned to {pin}' for one, pin in found.items() if pin not in one.specifier] == []


def concerns(requirement):
    return not requirement.marker or requirement.marker.evaluate(dict(extra='test'))


def test_version_agrees_in_package_citation_and_changelog():
    version = sinklab.__version__
    citation = yaml.safe_load((ROOT / 'CITATION.cff').read_text())
    released = re.search(r'^## \[([0-9.]+)\]', (ROOT / 'CHANGELOG.md').read_text(), re.MULTILINE)
    assert citation['version'] == released.group(1) == version


@pytest.mark.parametrize('minor', PINS)
def test_constraints_have_only_names_and_versions(minor):
    assert all(re.fullmatch(r'[a-z0-9-]+==[0-9][0-9a-z.+]*', line) for line in PINS[minor].splitlines())


@with_make
@pytest.mark.parametrize('target', ['.venv/uv', '.venv/quickstart', '.venv/test'])
@pytest.mark.parametrize('minor', PINS)
def test_make_installs_constraints_of_python_version(minor, target, python):
    said = make('-n', '-B', target, python(minor))
    installs = [line for line in said.splitlines() if 'pip install' in line]
    assert installs
    assert all(re.search(f'--constraints? tests/constraints/{minor}.txt ', line) for line in installs)


@with_make
def test_make_without_constraints_installs_newest_versions_with_note(python):
    said = make('-n', '-B', '.venv/test', python('3.99'))
    assert 'Python 3.99' in said
    assert 'tests/constraints' in said
    assert 'constraint ' not in said
    assert 'constraints ' not in said


@with_make
def test_make_does_not_set_jax_platforms():
    assert make('--eval=shown: ; @echo "<$$JAX_PLATFORMS>"', 'shown') == '<>\n'


@with_make
def test_audit_reads_every_file_of_pinned_versions():
    said = make('-n', 'audit')
    folders = re.search(r'for file in (.*?);', said)[1].split()
    found = {path for folder in folders for path in ROOT.glob(folder)}
    assert found == {path for name in ('launch/pins', 'tests/constraints') for path in (ROOT / name).iterdir()}
    assert '--strict' in said, 'without it, a service that knows no package finds no vulnerability'


JOBS = {
    name: dict(re.findall(r'^([a-z0-9-]+)==(\S+)', (ROOT / 'launch' / 'pins' / f'{name}.txt').read_text(), re.M))
    for name in ('tpu', 'gpu')
}


@pytest.mark.parametrize('name', JOBS)
def test_job_pins_have_hashes(name):
    """Launchers install with --require-hashes, which rejects a file with one missing hash."""
    entries = re.split(r'\n(?! )', (ROOT / 'launch' / 'pins' / f'{name}.txt').read_text().strip())
    form = r'[a-z0-9-]+==[0-9][0-9a-z.+]*( \\\n    --hash=sha256:[0-9a-f]{64})+'
    assert [entry.split()[0] for entry in entries if not re.fullmatch(form, entry)] == []
    assert len(entries) == len(JOBS[name])


@pytest.mark.parametrize('name', JOBS)
def test_job_pins_match_tested_versions(name):
    tested = dict(line.split('==') for line in PINS['3.11'].splitlines())
    shared = tested.keys() & JOBS[name].keys()
    assert len(shared) > 80
    assert [one for one in sorted(shared) if tested[one] != JOBS[name][one]] == []


def test_job_libtpu_pin_satisfies_jax_requirement():
    """This version may differ from that of the benchmarks; docs/guides/kernels.md compares both."""
    installed = importlib.metadata.version('jax')
    if installed != JOBS['tpu']['jax']:
        pytest.skip(f'jobs install jax {JOBS["tpu"]["jax"]}, and what jax {installed} asks for says nothing of that')
    asked = [Requirement(text) for text in importlib.metadata.requires('jax')]
    (libtpu,) = [one for one in asked if one.name == 'libtpu' and one.marker.evaluate(dict(extra='tpu'))]
    assert JOBS['tpu']['libtpu'] in libtpu.specifier


def test_benchmark_libtpu_version_matches_makefile_and_guide():
    (made,) = re.findall(r'libtpu==(\S+)', (ROOT / 'Makefile').read_text())
    costs = json.loads((ROOT / 'benchmarks' / 'tpu_cost.json').read_text())['versions']['libtpu']
    steps = json.loads((ROOT / 'benchmarks' / 'step_cost.json').read_text())['libtpu']
    assert {costs, steps} == {made}
    page = ' '.join((ROOT / 'docs' / 'guides' / 'kernels.md').read_text(encoding='utf-8').split())
    assert re.search(rf'compiles each kernel with libtpu\s{re.escape(made)} ', page)
    assert f'libtpu {JOBS["tpu"]["libtpu"]}, the one that jax {JOBS["tpu"]["jax"]} asks for' in page
