"""Persistent compilation cache: reuse, report, flags and location."""

import os
import subprocess
import sys

import pytest

from sinklab.cli import layout_flags

SCRIPT = """
import sys
from sinklab.cli.layout_flags import set_compilation_cache
set_compilation_cache(sys.argv[1])
import jax
jax.jit(lambda x: x + 1)(1.0)
"""


@pytest.mark.slow
def test_compilation_cache_holds_programs_and_none_disables_it(tmp_path):
    environment = {name: value for name, value in os.environ.items() if 'CACHE' not in name}
    for folder in (tmp_path, 'none'):
        subprocess.run([sys.executable, '-c', SCRIPT, str(folder)], env=environment, cwd=tmp_path, check=True)
        assert any(path.name.startswith('jit__lambda') for path in tmp_path.iterdir())
        assert not (tmp_path / 'none').exists()


def test_set_fast_compile_flags_applies_only_to_smoke_size(monkeypatch):
    monkeypatch.setenv('XLA_FLAGS', '--xla_dump_to=somewhere')
    for size in (None, 'paper', 'quickstart'):
        layout_flags.set_fast_compile_flags(size)
    assert os.environ['XLA_FLAGS'] == '--xla_dump_to=somewhere'
    layout_flags.set_fast_compile_flags('smoke')
    layout_flags.set_fast_compile_flags('smoke')
    assert os.environ['XLA_FLAGS'] == f'--xla_dump_to=somewhere {layout_flags.FAST_COMPILE_FLAGS}'
