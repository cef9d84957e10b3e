"""A page of docs/ to the letter: its edits in a copy of this tree, and its commands there."""

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


def edited_copy(tree, page):
    """A copy of this tree with the edits of a page."""
    copy(tree)
    assert blocks(page, 'diff')
    for edit in blocks(page, 'diff'):
        output(tree, 'git apply --verbose -', edit)
    return tree


def commands(page, verb=''):
    return [line for block in blocks(page, 'sh') for line in block.splitlines() if f'{verb} ' in line]


def blocks(page, kind):
    """The ```kind blocks of a page."""
    text = (ROOT / 'docs' / page).read_text(encoding='utf-8')
    return re.findall(rf'^```{kind}\n(.*?)^```$', text, re.MULTILINE | re.DOTALL)


def copy(tree):
    """The code as it stands in the working tree, with this interpreter where `make` would put one."""
    for name in ('sinklab', 'configs', 'tests', 'docs'):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns('__pycache__'))
    for name in ('pyproject.toml', 'README.md'):
        shutil.copy(ROOT / name, tree)
    bin = tree / '.venv' / 'bin'
    bin.mkdir(parents=True)
    for name, module in PROGRAMS.items():
        (bin / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
        (bin / name).chmod(0o755)


def output(tree, command, given=None):
    """Runs a command of the page in the tree; its processes find each other's compiled functions and tokens."""
    here = {'PYTHONPATH': str(tree), 'JAX_PLATFORMS': 'cpu', 'GIT_CEILING_DIRECTORIES': str(tree.parent)}
    environment = {**os.environ, **here}
    process = subprocess.run(
        command, shell=True, cwd=tree, env=environment, input=given, capture_output=True, text=True, timeout=1800
    )
    assert process.returncode == 0, f'$ {command}\n{given or ""}{process.stdout}{process.stderr}'
    return process.stdout
