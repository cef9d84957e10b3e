"""The run folder: what is damaged in it is said, and nothing old is taken for its end."""

import json

import pytest
from conftest import tiny

from sinklab.folder import Folder
from sinklab.record import Refusal
from sinklab.spec import Hardware
from sinklab.sweep import plan


@pytest.fixture
def folder(tmp_path):
    """Of a run whose 8 steps are done."""
    folder, spec = Folder(tmp_path / 'run'), tiny()
    folder.claim(spec, {})
    (folder.checkpoints / '8').mkdir(parents=True)
    records = [{'step': step, 'seconds': 1.0, 'valid/loss': loss} for step, loss in ((0, 5.9), (8, 5.1))]
    (folder.path / 'metrics.jsonl').write_text(''.join(json.dumps(record) + '\n' for record in records))
    return folder


def test_a_run_that_has_lost_the_numbers_of_its_end_is_not_done(folder):
    run = plan.Run('softmax', 0, folder, None, tiny())
    plan.look(run, Hardware())
    assert (run.outcome, run.reason) == ('done', '')
    metrics = folder.path / 'metrics.jsonl'
    metrics.write_bytes(metrics.read_bytes()[:-20])
    run = plan.Run('softmax', 0, folder, None, tiny())
    plan.look(run, Hardware())
    assert run.outcome == 'to do'


def test_a_damaged_config_is_named(folder):
    folder.check(tiny())
    (folder.path / 'config.json').write_text('{"a":')
    with pytest.raises(Refusal, match=r'config\.json is damaged .* bring it back, or do without this folder'):
        folder.check(tiny())


def test_a_run_of_another_version_is_refused_with_what_differs_and_its_commit(folder):
    config = folder.read('config')
    config['model']['width_of_old'] = config['model'].pop('width')
    folder.write('config', config)
    folder.write('environment', dict(commit='0123abc'))
    with pytest.raises(Refusal) as refusal:
        folder.check(tiny())
    line = str(refusal.value)
    assert len(line.splitlines()) == 1
    assert 'whose config has model.width_of_old, unknown here and lacks model.width;' in line
    assert f'go on with commit 0123abc, or give a new folder, e.g. --workdir={folder}-2' in line
    config['model']['width'] = 16
    folder.write('config', config)
    (folder.path / 'environment.json').unlink()
    with pytest.raises(Refusal, match=r'has model\.width_of_old, unknown here; .* commit None'):
        folder.check(tiny())
