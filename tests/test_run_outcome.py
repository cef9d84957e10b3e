"""Outcomes of runs: signals, outcome.json and exit codes."""

import contextlib
import signal

import pytest
from jax.errors import JaxRuntimeError
from tiny_runs import write_checkpoints
from tiny_specs import make_tiny_spec

from sinklab.cli import rows
from sinklab.cli.main import main
from sinklab.config.spec import Layout
from sinklab.errors import UserError
from sinklab.run_dir import RunDir
from sinklab.sweep import plan
from sinklab.sweep.run import classify_exit
from sinklab.train import loop, run_outcome
from sinklab.train.run_outcome import write_outcome


@pytest.mark.parametrize(
    ('outcome_record', 'exit_code', 'output', 'expected'),
    [
        ({'kind': 'crashed', 'message': 'KeyError: 3'}, 1, 'sinklab train: no room', ('crashed', 'KeyError: 3')),
        ({}, 1, 'preparing\nsinklab train: no room\n', ('refused', 'sinklab train: no room')),
        ({}, 1, '', ('refused', 'exit code 1, without a message')),
        ({}, -signal.SIGKILL, 'step 2/4', ('crashed', 'killed by SIGKILL')),
        ({}, -signal.SIGTERM, '', ('stopped', 'killed by SIGTERM')),
        ({'kind': 'lost', 'message': 'OSError: 5'}, 75, '', ('crashed', 'OSError: 5')),
        ({}, 75, 'x\nOSError: no space\n', ('crashed', 'OSError: no space')),
        ({}, 130, 'x\n', ('stopped', 'x')),
    ],
)
def test_classify_exit_prefers_written_outcome_to_exit_code(outcome_record, exit_code, output, expected):
    assert classify_exit(outcome_record, exit_code, output) == expected


def test_sweep_ignores_deleted_outcome_of_earlier_attempt(tmp_path):
    run = plan.SweepRun('softmax', 0, RunDir(tmp_path / 'run'), None, make_tiny_spec())
    run.run_dir.initialize(run.spec, {})
    run.run_dir.write_json('outcome', dict(kind='diverged', message='loss is nan'))
    plan.check_run(run, Layout())
    assert (run.outcome, run.reason) == ('diverged', 'loss is nan')
    run.run_dir.delete_json('outcome')
    assert run.read_last_outcome() == {}


@pytest.mark.parametrize('handler', [signal.default_int_handler, signal.SIG_IGN])
def test_signals_within_interval_count_once_and_later_signal_interrupts(monkeypatch, handler):
    with contextlib.ExitStack() as exit_stack:
        exit_stack.callback(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, handler))
        received_signals = exit_stack.enter_context(run_outcome.collect_stop_signals())
        for _ in range(3):
            signal.raise_signal(signal.SIGINT)
        assert received_signals == [signal.SIGINT]
        monkeypatch.setattr(run_outcome, 'SAME_SIGNAL_SECONDS', 0.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ('error', 'kind', 'code', 'message'),
    [
        (None, 'done', 0, ''),
        (loop.DivergedError(5, {'train/loss': float('nan'), 'x': 1.0}), 'diverged', 3, 'train/loss is nan at step 5'),
        (loop.StoppedBySignal(signal.SIGTERM, 5), 'stopped', 143, 'saved at step 5'),
        (loop.StoppedBySignal(signal.SIGINT, 5), 'stopped', 130, 'saved at step 5'),
        (KeyboardInterrupt(), 'stopped', 130, 'stopped at once; what was saved before is intact'),
        (UserError('no room'), 'refused', 1, 'no room'),
        (OSError(28, 'No space left'), 'refused', 1, 'No space left'),
        (FileNotFoundError(2, 'missing'), 'lost', 75, 'missing'),
        (JaxRuntimeError('INTERNAL'), 'lost', 75, 'JaxRuntimeError: INTERNAL'),
        (KeyError(3), 'crashed', 1, 'KeyError: 3'),
    ],
    ids=str,
)
def test_write_outcome_records_and_reraises_every_exit_kind(tmp_path, error, kind, code, message):
    if isinstance(error, KeyError):
        error.add_note('a note of jax')
    folder = RunDir(tmp_path)
    write_checkpoints(folder, 4)
    (folder.path / 'metrics.jsonl').write_text('{"step": 4}\n{"step": 5}\n{"st')
    folder.write_json('config', {})
    folder.write_json('outcome', dict(kind='of an earlier attempt'))

    def exit_run():
        with write_outcome(folder):
            assert not (folder.path / 'outcome.json').exists()
            if error:
                raise error

    if error:
        with pytest.raises(type(error)):
            exit_run()
    else:
        exit_run()
    outcome = folder.read_json('outcome')
    assert 'a note' not in outcome['message']
    assert message in outcome.pop('message')
    assert outcome == dict(kind=kind, step=5, checkpoint=4, exit_code=code)


@pytest.mark.parametrize(
    ('error', 'code', 'hint'),
    [
        (OSError(5, 'Input/output error'), 75, '(Input/output error); start the same command again'),
        (JaxRuntimeError('INTERNAL'), 75, 'INTERNAL; start the same command again'),
        (KeyError(3), 1, 'KeyError: 3'),
        (UserError('no room'), 1, 'sinklab rows: no room'),
    ],
    ids=str,
)
def test_commands_use_the_same_exit_codes(monkeypatch, capsys, error, code, hint):
    def raise_error(arguments, rest):
        raise error

    monkeypatch.setattr(rows, 'run', raise_error)
    assert main(['rows']) == code
    assert capsys.readouterr().err.strip().endswith(hint)


def test_train_failure_before_data_loading_replaces_earlier_outcome(tmp_path, monkeypatch):
    """Prevent endless restarts by a launcher that restarts a run after exit code 143."""
    spec, folder = make_tiny_spec(), RunDir(tmp_path)
    folder.initialize(spec, {})
    folder.write_json('outcome', dict(kind='stopped', exit_code=143))

    def raise_memory_error(spec):
        raise MemoryError('of the data')

    monkeypatch.setattr(loop, 'load_run_data', raise_memory_error)
    with pytest.raises(MemoryError):
        loop.train(spec, Layout(), folder, {})
    assert folder.read_json('outcome') == dict(
        kind='crashed', step=0, checkpoint=None, message='MemoryError: of the data', exit_code=1
    )
