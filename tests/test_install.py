"""Installation from a clone, and the page of dependencies."""

import re
import runpy
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def read_requirements(monkeypatch):
    """Return {extra, or None for the core: its requirements} of setup.py."""
    setuptools = pytest.importorskip('setuptools')
    setup_options = {}
    monkeypatch.setattr(setuptools, 'setup', lambda **options: setup_options.update(options))
    runpy.run_path(str(ROOT / 'setup.py'))
    return {None: setup_options['install_requires'], **setup_options['extras_require']}


def test_page_of_dependencies_has_row_for_every_requirement_with_its_bounds(monkeypatch):
    page = (ROOT / 'docs' / 'reference' / 'dependencies.md').read_text(encoding='utf-8')
    tables = re.findall(r'^##+ (?:Core|`(\w+)`)\n(.*?)(?=^##|\Z)', page, re.MULTILINE | re.DOTALL)
    actual = {extra or None: re.findall(r'^\| `(.*?)` \| .+ \|$', rows, re.MULTILINE) for extra, rows in tables}
    expected = read_requirements(monkeypatch)
    del expected['test']
    assert actual == expected


@pytest.mark.slow
def test_editable_install_is_importable_above_clone_named_sinklab(tmp_path):
    pytest.importorskip('setuptools')
    pytest.importorskip('pip')
    clone, environment, wheels = tmp_path / 'sinklab', tmp_path / 'env', tmp_path / 'wheels'
    for name in ('sinklab', 'configs'):
        shutil.copytree(ROOT / name, clone / name, ignore=shutil.ignore_patterns('__pycache__'))
    for name in ('setup.py', 'pyproject.toml', 'README.md', 'LICENSE'):
        shutil.copy(ROOT / name, clone)
    venv.create(environment, symlinks=True)
    python = environment / 'bin' / 'python'
    build_code = f'from setuptools import build_meta; print(build_meta.build_editable({str(wheels)!r}))'
    wheels.mkdir()
    run_command([sys.executable, '-c', build_code], clone)
    (wheel,) = wheels.iterdir()
    pip = [sys.executable, '-m', 'pip', '--disable-pip-version-check', '--python', str(python)]
    run_command([*pip, 'install', '--no-index', '--no-deps', str(wheel)], tmp_path)

    for folder in (tmp_path, clone, environment):
        assert run_command(
            [str(python), '-c', 'import sinklab; print(sinklab.open.__module__, sinklab.__file__)'], folder
        ) == (f'sinklab {clone}/sinklab/__init__.py\n')


def run_command(command, folder):
    """Return what a command prints in a folder, without the paths of the test's own Python."""
    process = subprocess.run(command, cwd=folder, env={}, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout
