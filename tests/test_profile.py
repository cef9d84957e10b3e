"""Traces of some steps."""

import pytest
from runs import spec, train

from sinklab.folder import Folder
from sinklab.record import Refusal
from sinklab.train.profile import Profile


@pytest.mark.slow
def test_a_trace_of_the_steps_that_are_asked_for_is_written(corpus, tmp_path):
    with Profile(Folder(tmp_path), '3:2') as profile:
        train(spec(corpus, log__every_steps=1), tmp_path, profile)
        assert not profile.going
    assert [path.suffixes[-1] for path in tmp_path.glob('profile/plugins/profile/*/*.xplane.pb')] == ['.pb']


@pytest.mark.slow
def test_a_run_that_ends_first_ends_the_trace(corpus, tmp_path):
    with Profile(Folder(tmp_path), '8:100') as profile:
        train(spec(corpus), tmp_path, profile)
        assert profile.going
    assert not profile.going
    assert [*tmp_path.glob('profile/plugins/profile/*/*.xplane.pb')]


@pytest.mark.parametrize('given', ['3', '0:2', '3:0', 'a:b', '3:2:1', '-1:2'])
def test_what_is_no_range_is_refused(tmp_path, given):
    with pytest.raises(Refusal, match='give STEP:COUNT'):
        Profile(Folder(tmp_path), given)


def test_a_bucket_is_refused():
    folder = Folder('runs/x')
    folder.path = 'gs://bucket/run'
    with pytest.raises(Refusal, match='writes to disks alone'):
        Profile(folder, '3:2')
