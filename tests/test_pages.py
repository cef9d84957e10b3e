"""A run is begun once more for large pages where that helps, and nowhere else."""

import os
import subprocess
import sys

import pytest

from sinklab.cli import pages


@pytest.fixture
def begun(monkeypatch, tmp_path):
    """begun(tunables, what the system says, libc) -> GLIBC_TUNABLES as the process begins again, or None."""
    monkeypatch.setattr(pages.importlib.util, 'find_spec', lambda name: None)

    def run(told='', enabled='always [madvise] never', libc=('glibc', '2.36')):
        found = []
        monkeypatch.setenv(pages.TUNABLES, told)
        monkeypatch.setattr(pages, 'ENABLED', tmp_path / 'enabled')
        pages.ENABLED.write_text(enabled)
        monkeypatch.setattr(pages.platform, 'libc_ver', lambda: libc)
        monkeypatch.setattr(pages.os, 'execv', lambda *command: found.append(os.environ[pages.TUNABLES]))
        pages.large()
        return found[0] if found else None

    return run


def test_malloc_is_told_to_ask_beside_what_it_was_told(begun):
    assert begun() == 'glibc.malloc.hugetlb=1'
    assert begun('glibc.malloc.arena_max=1') == 'glibc.malloc.arena_max=1:glibc.malloc.hugetlb=1'


@pytest.mark.parametrize(
    'harm',
    [
        dict(told='glibc.malloc.hugetlb=0'),  # a user's own word
        dict(enabled='[always] madvise never'),
        dict(enabled='always madvise [never]'),
        dict(libc=('glibc', '2.31')),
        dict(libc=('', '')),
        dict(libc=('glibc', 'of its own kind')),
    ],
)
def test_a_process_goes_on_where_large_pages_are_not_to_be_had_or_wanted(begun, harm):
    assert begun(**harm) is None


def test_a_process_goes_on_where_the_system_does_not_say(begun, monkeypatch, tmp_path):
    monkeypatch.setattr(pages.Path, 'read_text', lambda self: (_ for _ in ()).throw(FileNotFoundError))
    assert not pages.given_to_those_who_ask()


def test_a_process_goes_on_beside_an_accelerator(begun, monkeypatch):
    monkeypatch.setattr(pages.importlib.util, 'find_spec', lambda name: name == 'libtpu')
    assert begun() is None


@pytest.mark.slow
def test_what_is_asked_for_is_what_begins_again():
    """The command of a run, in a process of its own, whose arguments are as they were."""
    code = (
        'import sys; from sinklab.cli import pages; from sinklab.cli.main import main; '
        'pages.given_to_those_who_ask = lambda: True; pages.ACCELERATORS = (); sys.exit(main())'
    )
    command = [sys.executable, '-c', code, 'train', '--config=nowhere.py', '--workdir=a folder']
    environment = os.environ | {pages.TUNABLES: ''}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert found.returncode == 1
    assert 'nowhere.py' in found.stderr
    assert len(found.stderr.splitlines()) == 1
