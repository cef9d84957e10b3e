"""Tests of callbacks of the training loop."""

import pytest
from runs import outcome, spec, train

from sinklab.train.callbacks import BestEffortCallback, Callback


class FullDisk(Callback):
    calls = 0

    def on_record(self, record, written):
        self.calls += 1
        raise OSError(28, 'No space left on device')


@pytest.mark.slow
def test_best_effort_callback_error_is_warning_and_training_continues(corpus, tmp_path):
    mirror, warnings = FullDisk(), []
    records = train(spec(corpus), tmp_path / 'run', BestEffortCallback(mirror, 'TensorBoard', warnings.append))
    assert [record['step'] for record in records] == list(range(9))
    assert outcome(tmp_path / 'run')['kind'] == 'done'
    assert mirror.calls == len(warnings) == 1
    assert 'TensorBoard: OSError' in warnings[0]
