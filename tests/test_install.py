"""Installation from a clone, and install commands in messages and docs."""

import re
import runpy
import shlex
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from sinklab import install_commands

ROOT = Path(__file__).parents[1]
EXTRAS = ('report', 'notebook', 'hf', 'tensorboard', 'wandb', 'data', 'evaluate', 'gcs', 'tpu', 'gpu')


@pytest.fixture
def bin_folder(tmp_path, monkeypatch):
    """Fake a Python environment with pip and without uv, and return its bin folder."""
    monkeypatch.setattr(sys, 'executable', str(tmp_path / 'env' / 'bin' / 'python'))
    monkeypatch.setattr(install_commands.importlib.util, 'find_spec', lambda name: name)
    monkeypatch.setattr(install_commands.shutil, 'which', lambda name: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'env' / 'bin').mkdir(parents=True)
    return tmp_path / 'env' / 'bin'


def test_extra_command_installs_clone_with_pip_of_environment(bin_folder, monkeypatch):
    monkeypatch.setattr(install_commands, 'ROOT', ROOT)
    expected = ['env/bin/python', '-m', 'pip', 'install', '-e', f'{ROOT}[notebook]']
    assert shlex.split(install_commands.format_extra_command('notebook')) == expected


def test_installer_prefers_uv_of_environment(bin_folder):
    (bin_folder / 'uv').touch()
    assert install_commands.format_installer() == 'env/bin/uv pip install --python env/bin/python'


def test_installer_uses_uv_on_path_without_pip(bin_folder, monkeypatch):
    monkeypatch.setattr(install_commands.importlib.util, 'find_spec', lambda name: None)
    monkeypatch.setattr(install_commands.shutil, 'which', lambda name: f'/usr/bin/{name}')
    assert install_commands.format_installer() == 'uv pip install --python env/bin/python'


def test_extra_command_names_clone_by_dot_or_quoted_path(bin_folder, monkeypatch, tmp_path):
    clone = tmp_path / "a user's clone"
    clone.mkdir()
    (clone / 'setup.py').touch()
    monkeypatch.setattr(install_commands, 'ROOT', clone)
    assert shlex.split(install_commands.format_extra_command('hf'))[-1] == "a user's clone[hf]"
    monkeypatch.chdir(clone)
    assert install_commands.format_extra_command('hf').endswith(" -e '.[hf]'")


@pytest.mark.parametrize('extra', EXTRAS)
def test_extra_command_names_requirements_without_clone(bin_folder, monkeypatch, tmp_path, extra):
    monkeypatch.setattr(install_commands, 'ROOT', tmp_path)
    command = shlex.split(install_commands.format_extra_command(extra))
    assert command[:4] == ['env/bin/python', '-m', 'pip', 'install']
    assert len(command) > 4
    requirements = [Requirement(part) for part in command[4:]]
    assert all(requirement.specifier and not requirement.marker for requirement in requirements)


def test_messages_and_docs_name_no_package_index_command():
    files = [*ROOT.glob('*.md'), *(ROOT / 'docs').rglob('*.md'), *(ROOT / 'docs').rglob('*.ipynb')]
    files += [path for name in ('sinklab', 'launch', 'benchmarks') for path in (ROOT / name).rglob('*.py')]
    matching_lines = [
        f'{path.relative_to(ROOT)}: {line.strip()}'
        for path in files
        if path.name != 'install_commands.py'
        for line in path.read_text(encoding='utf-8').splitlines()
        if re.search(r'pip install .*sinklab\[', line)
    ]
    assert matching_lines == []


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
