import os
import subprocess
import sys

import jaxlib
import pytest

from sinklab import xla_faults

LAST_SUM = """
import sinklab, jax, jax.numpy as jnp, numpy as np
rows = np.zeros((32769, 3), np.float32)
rows[:, 0] = np.arange(32769)
print(float(jax.jit(jax.vmap(lambda row: jnp.sum((jnp.eye(3) @ row) ** 2)))(rows)[-1]))
"""


HIGH_RANK_SUM = """
import sinklab, jax, jax.numpy as jnp
u, v = (jax.random.normal(jax.random.key(seed), (3, 1, 2, 2, 8, 8, 8)) for seed in (0, 1))
sums, products = jax.jit(lambda a, b: jnp.sum(a * b, axis=3))(u, v), u * v
print(bool(jnp.abs(sums - products[:, :, :, 0] - products[:, :, :, 1]).max() < 1e-5))
"""


def run_python(*arguments: str, xla_flags: str = '') -> subprocess.CompletedProcess:
    environment = {**os.environ, 'XLA_FLAGS': xla_flags, 'JAX_PLATFORMS': 'cpu'}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize(('script', 'expected'), [(LAST_SUM, float(32768**2)), (HIGH_RANK_SUM, True)])
def test_sums_on_cpus_are_right_after_import_of_sinklab(script, expected):
    assert run_python('-c', script).stdout == f'{expected}\n'


@pytest.mark.parametrize('xla_flags', ['', '--xla_dump_to=x'])
def test_flag_is_added_for_faulty_versions_alone(monkeypatch, xla_flags):
    monkeypatch.setenv('XLA_FLAGS', xla_flags)
    xla_faults.disable_faulty_fusions()
    is_faulty = jaxlib.__version__ in xla_faults.FAULTY_VERSIONS
    added = [f'{xla_faults.FUSION_FLAG}='] if is_faulty else []
    assert os.environ['XLA_FLAGS'].split() == [*xla_flags.split(), *added]


def test_flag_of_user_is_kept(monkeypatch):
    monkeypatch.setenv('XLA_FLAGS', f'{xla_faults.FUSION_FLAG}=dot')
    xla_faults.disable_faulty_fusions()
    assert os.environ['XLA_FLAGS'] == f'{xla_faults.FUSION_FLAG}=dot'


@pytest.mark.skipif(jaxlib.__version__ != '0.10.2', reason='this version of jaxlib computes the sum right')
@pytest.mark.slow
def test_training_with_wrong_sums_is_refused_before_it_starts(config, tmp_path):
    flags = f'{xla_faults.FUSION_FLAG}=reduce'
    command = ['-m', 'sinklab', 'train', f'--config={config}', f'--workdir={tmp_path / "run"}']
    result = run_python(*command, xla_flags=flags)
    last_line = result.stderr.splitlines()[-1]
    assert (result.returncode, 'jaxlib 0.10.2' in last_line, xla_faults.FUSION_FLAG in last_line) == (1, True, True)
