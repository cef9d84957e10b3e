"""Persistent compilation cache: reuse, report, flags and location."""

import os
import subprocess
import sys

import pytest

from sinklab.cli import hardware_flags

SCRIPT = """
import sys
from sinklab.cli.hardware_flags import set_compilation_cache
compiled = set_compilation_cache(sys.argv[1])
import jax
jax.jit(lambda x: x + 1)(1.0)
print(compiled)
"""


def run_script(folder):
    """Return the cache report of a new process."""
    environment = {name: value for name, value in os.environ.items() if 'CACHE' not in name}
    command = [sys.executable, '-c', SCRIPT, str(folder)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.slow
def test_compilation_cache_is_reused_by_second_process(tmp_path):
    assert run_script(tmp_path) == f'programs: 1 compiled, 0 found in {tmp_path}'
    assert run_script(tmp_path) == f'programs: 0 compiled, 1 found in {tmp_path}'


@pytest.mark.slow
def test_compilation_cache_is_disabled_by_none():
    assert run_script('none') == 'None'


def test_set_fast_compile_flags_applies_only_to_smoke_size(monkeypatch):
    monkeypatch.setenv('XLA_FLAGS', '--xla_dump_to=somewhere')
    for size in (None, 'paper', 'quickstart'):
        hardware_flags.set_fast_compile_flags(size)
    assert os.environ['XLA_FLAGS'] == '--xla_dump_to=somewhere'
    hardware_flags.set_fast_compile_flags('smoke')
    hardware_flags.set_fast_compile_flags('smoke')
    assert os.environ['XLA_FLAGS'] == f'--xla_dump_to=somewhere {hardware_flags.FAST_COMPILE_FLAGS}'
