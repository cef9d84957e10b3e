"""Test that several attempts of a run are one run of W&B."""

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_wandb_has_one_run_for_several_attempts(tmp_path, config, monkeypatch):
    pytest.importorskip('wandb')
    monkeypatch.setenv('WANDB_MODE', 'offline')
    arguments = ['train', f'--config={config}', f'--workdir={tmp_path}/run', '--wandb']
    for steps in (4, 8):
        command = [sys.executable, '-m', 'sinklab', *arguments, f'--config.optimizer.steps={steps}']
        subprocess.run(command, check=True, capture_output=True)
    paths = sorted((tmp_path / 'run' / 'wandb').glob('offline-run-*/*.wandb'))
    assert len(paths) == 2
    assert len({path.stem for path in paths}) == 1
    assert all(b'train/loss' in path.read_bytes() for path in paths)
