"""Runs whose checkpoints are damaged: they go on from a sound one, or say that there is none."""

import shutil

import pytest
from runs import Hearing, spec, timeless, train

from sinklab.folder import Folder
from sinklab.record import Refusal


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_the_run_goes_on_from_the_one_before(whole, corpus, tmp_path):
    shutil.copytree(whole[0], tmp_path / 'run')
    shutil.rmtree(tmp_path / 'run' / 'checkpoints' / '8' / 'state')
    hearing = Hearing()
    assert timeless(train(spec(corpus), tmp_path / 'run', hearing)) == timeless(whole[1])
    (line,) = hearing.notes
    assert line.startswith(f'{tmp_path}/run/checkpoints/8 is passed over: state/')
    assert Folder(tmp_path / 'run').checkpoint_steps() == [4, 8]


@pytest.mark.slow
def test_a_run_whose_checkpoints_are_all_damaged_is_refused_and_begins_anew_without_them(whole, corpus, tmp_path):
    shutil.copytree(whole[0], tmp_path / 'run')
    saved = tmp_path / 'run' / 'checkpoints'
    for step in (4, 8):
        shutil.rmtree(saved / str(step) / 'state')
    with pytest.raises(Refusal, match=r'has no sound checkpoint .* or delete .*/checkpoints alone'):
        train(spec(corpus), tmp_path / 'run')
    shutil.rmtree(saved)
    assert timeless(train(spec(corpus), tmp_path / 'run')) == timeless(whole[1])
