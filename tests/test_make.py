"""Pinned versions."""

import importlib.metadata
import json
import re
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import sinklab

ROOT = Path(__file__).parents[1]
TESTED_PINS = (ROOT / 'tests' / 'constraints' / '3.11.txt').read_text()


def test_version_agrees_in_package_citation_and_changelog():
    version = sinklab.__version__
    citation = yaml.safe_load((ROOT / 'CITATION.cff').read_text())
    heading = re.search(r'^## \[([0-9.]+)\]', (ROOT / 'CHANGELOG.md').read_text(), re.MULTILINE)
    assert citation['version'] == heading.group(1) == version


JOB_PINS = {
    name: dict(re.findall(r'^([a-z0-9-]+)==(\S+)', (ROOT / 'launch' / 'pins' / f'{name}.txt').read_text(), re.M))
    for name in ('tpu', 'gpu')
}


@pytest.mark.parametrize('name', JOB_PINS)
def test_job_pins_have_hashes(name):
    """Launchers install with --require-hashes, which rejects a file with one missing hash."""
    entries = re.split(r'\n(?! )', (ROOT / 'launch' / 'pins' / f'{name}.txt').read_text().strip())
    pattern = r'[a-z0-9-]+==[0-9][0-9a-z.+]*( \\\n    --hash=sha256:[0-9a-f]{64})+'
    assert [entry.split()[0] for entry in entries if not re.fullmatch(pattern, entry)] == []
    assert len(entries) == len(JOB_PINS[name])


@pytest.mark.parametrize('name', JOB_PINS)
def test_job_pins_match_tested_versions(name):
    tested_pins = dict(line.split('==') for line in TESTED_PINS.splitlines())
    shared = tested_pins.keys() & JOB_PINS[name].keys()
    assert len(shared) > 80
    assert [package for package in sorted(shared) if tested_pins[package] != JOB_PINS[name][package]] == []


def test_job_libtpu_pin_satisfies_jax_requirement():
    """This version may differ from that of the benchmarks; docs/guides/kernels.md compares both."""
    installed = importlib.metadata.version('jax')
    if installed != JOB_PINS['tpu']['jax']:
        pytest.skip(
            f'jobs install jax {JOB_PINS["tpu"]["jax"]}, and what jax {installed} asks for says nothing of that'
        )
    requirements = [Requirement(text) for text in importlib.metadata.requires('jax')]
    (libtpu,) = [
        requirement
        for requirement in requirements
        if requirement.name == 'libtpu' and requirement.marker.evaluate(dict(extra='tpu'))
    ]
    assert JOB_PINS['tpu']['libtpu'] in libtpu.specifier


def test_benchmark_libtpu_version_matches_makefile():
    (makefile_version,) = re.findall(r'libtpu==(\S+)', (ROOT / 'Makefile').read_text())
    kernel_version = json.loads((ROOT / 'benchmarks' / 'tpu_cost.json').read_text())['versions']['libtpu']
    step_version = json.loads((ROOT / 'benchmarks' / 'step_cost.json').read_text())['versions']['libtpu']
    assert {kernel_version, step_version} == {makefile_version}
