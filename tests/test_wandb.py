"""Test that the wandb mirror has the content of metrics.jsonl."""

import json
import subprocess
import sys

import pytest
import wandb_reader


@pytest.mark.slow
def test_wandb_has_one_run_for_several_attempts(tmp_path, config, monkeypatch):
    pytest.importorskip('wandb')
    monkeypatch.setenv('WANDB_MODE', 'offline')
    arguments = ['train', f'--config={config}', f'--workdir={tmp_path}/run', '--wandb']
    for steps in (4, 8):
        command = [sys.executable, '-m', 'sinklab', *arguments, f'--config.optimizer.steps={steps}']
        subprocess.run(command, check=True, capture_output=True)
    expected = [json.loads(line) for line in (tmp_path / 'run' / 'metrics.jsonl').read_text().splitlines()]
    paths = sorted((tmp_path / 'run' / 'wandb').glob('offline-run-*/*.wandb'))
    result = [line for path in paths for line in wandb_reader.read_history(path)]
    assert len(paths) == 2
    assert len({path.stem for path in paths}) == 1
    assert result == expected
