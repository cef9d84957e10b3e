"""Edits and commands of a page of docs/, applied and run in a copy of this tree."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROGRAMS = {'sinklab': '-m sinklab', 'pytest': '-m pytest', 'python': ''}
NEEDS_GIT = pytest.mark.skipif(
    shutil.which('git') is None, reason='the edits of the page are applied by git, which is not here'
)


def make_edited_copy(tree, page):
    """Copy this tree, and apply the edits of a page to the copy."""
    copy_code(tree)
    assert read_blocks(page, 'diff')
    for edit in read_blocks(page, 'diff'):
        run_command(tree, 'git apply --verbose -', edit)
    return tree


def read_commands(page, verb=''):
    return [line for block in read_blocks(page, 'sh') for line in block.splitlines() if f'{verb} ' in line]


def read_blocks(page, language):
    """Return the contents of the fenced code blocks of a page in one language."""
    text = (ROOT / 'docs' / page).read_text(encoding='utf-8')
    return re.findall(rf'^```{language}\n(.*?)^```$', text, re.MULTILINE | re.DOTALL)


def copy_code(tree):
    """Copy the code of the working tree, with this interpreter in .venv, where `make` would install one."""
    for name in ('sinklab', 'configs', 'tests', 'docs'):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns('__pycache__'))
    for name in ('pyproject.toml', 'README.md'):
        shutil.copy(ROOT / name, tree)
    bin_folder = tree / '.venv' / 'bin'
    bin_folder.mkdir(parents=True)
    for name, module in PROGRAMS.items():
        (bin_folder / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
        (bin_folder / name).chmod(0o755)


def run_command(tree, command, stdin_text=None):
    """Run a command of the page in the tree, and return its standard output.

    The processes of all commands share the caches of compiled functions and tokens.
    """
    tree_variables = {'PYTHONPATH': str(tree), 'JAX_PLATFORMS': 'cpu', 'GIT_CEILING_DIRECTORIES': str(tree.parent)}
    environment = {**os.environ, **tree_variables}
    process = subprocess.run(
        command, shell=True, cwd=tree, env=environment, input=stdin_text, capture_output=True, text=True, timeout=1800
    )
    assert process.returncode == 0, f'$ {command}\n{stdin_text or ""}{process.stdout}{process.stderr}'
    return process.stdout
