"""A run is begun once more for large pages where that helps, and nowhere else."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sinklab import escape
from sinklab.cli import malloc
from sinklab.train.setup import describe_environment


@pytest.fixture
def begun(monkeypatch, tmp_path):
    """begun(...) -> the environment in which the process begins once more, or None."""
    monkeypatch.setattr(malloc, 'SYSTEM', tmp_path / 'enabled')
    monkeypatch.delenv(malloc.BEGUN, raising=False)

    def run(told='', enabled='always [madvise] never', libc=('glibc', '2.36'), alone=True, own='/bin/sinklab'):
        found = []
        monkeypatch.setenv(malloc.TUNABLES, told)
        malloc.SYSTEM.write_text(enabled)
        monkeypatch.setattr(malloc.platform, 'libc_ver', lambda: libc)
        monkeypatch.setattr(malloc, 'is_cpu_only', lambda: alone)
        monkeypatch.setattr(sys, 'argv', [own])
        monkeypatch.setattr(malloc.os, 'execve', lambda path, line, environment: found.append(environment))
        malloc.ask_for_large_pages()
        return found[0] if found else None

    return run


def test_malloc_is_told_to_ask_beside_what_it_was_told(begun):
    assert begun()[malloc.TUNABLES] == 'glibc.malloc.hugetlb=1'
    both = begun('glibc.malloc.arena_max=1')[malloc.TUNABLES]
    assert both == 'glibc.malloc.arena_max=1:glibc.malloc.hugetlb=1'


@pytest.mark.parametrize(
    'harm',
    [
        dict(told='glibc.malloc.hugetlb=0'),  # a user's own word
        dict(enabled='[always] madvise never'),
        dict(enabled='always madvise [never]'),
        dict(libc=('glibc', '2.31')),
        dict(libc=('glibc', 'of its own kind')),
        dict(libc=('', '')),  # no Linux
        dict(alone=False),
        dict(own='-'),  # a script from standard input, which could not be read again
        dict(own='/home/someone/script.py'),
        dict(own='/home/someone/theirs/__main__.py'),
    ],
)
def test_a_process_goes_on_where_large_pages_are_not_to_be_had_or_wanted(begun, harm):
    assert begun(**harm) is None


def test_a_process_begins_once_more_and_no_oftener_where_what_malloc_is_told_is_lost(begun, monkeypatch):
    monkeypatch.setenv(malloc.BEGUN, begun()[malloc.BEGUN])
    assert begun() is None


def test_a_process_that_cannot_begin_once_more_goes_on(begun, monkeypatch):
    def refused(*_):
        raise PermissionError

    assert begun()
    monkeypatch.setattr(malloc.os, 'execve', refused)
    assert malloc.ask_for_large_pages() is None


@pytest.mark.slow
@pytest.mark.parametrize('own', [[str(Path(sys.executable).with_name('sinklab'))], [sys.executable, '-m', 'sinklab']])
def test_a_command_is_the_same_process_with_the_same_arguments_once_more(own, tmp_path):
    """What each start of it is told is written by a hook of Python's, before all else."""
    (tmp_path / 'sitecustomize.py').write_text(
        'import os, sys\n'
        f'print(os.getpid(), os.environ["{malloc.TUNABLES}"], sys.orig_argv, file=open("starts", "a"), sep="\\t")\n'
        'from sinklab.cli import malloc\n'
        'malloc.is_asked = malloc.is_cpu_only = lambda: True\n'
    )
    variables = os.environ | {malloc.TUNABLES: '', 'PYTHONPATH': str(tmp_path)}
    line = [*own, 'train', '--config=nowhere.py', '--workdir=a folder']
    found = subprocess.run(line, env=variables, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert found.returncode == 1
    assert len(found.stderr.splitlines()) == 1
    one, other = (start.split('\t') for start in (tmp_path / 'starts').read_text().splitlines())
    assert (one[0], one[1]) == (other[0], '')
    assert other[1] == 'glibc.malloc.hugetlb=1'
    assert one[2].partition(',')[2] == other[2].partition(',')[2]  # all but how Python was found


def test_a_run_says_what_malloc_was_told(monkeypatch):
    monkeypatch.setenv(malloc.TUNABLES, 'glibc.malloc.hugetlb=1')
    assert describe_environment({}, 'dense', [])['malloc'] == 'glibc.malloc.hugetlb=1'


def test_this_process_is_no_command():
    assert not escape.is_sinklab_process()
