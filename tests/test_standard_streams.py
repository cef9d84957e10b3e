"""Standard streams: no effect of write errors on results and exit codes."""

import errno
import io
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_runs import read_outcome

from sinklab import standard_streams
from sinklab.run_dir import RunDir

SINKLAB = shlex.join([sys.executable, '-m', 'sinklab'])
# This program trains like the command, and sends itself SIGTERM after step 3.
SIGNALLED_SINKLAB = f"""{shlex.quote(sys.executable)} -c '
import os, signal, sys
from sinklab import standard_streams
import sinklab.train.loop as loop
def record(run, record, is_logged, old=loop.MetricsLogger.report_record):
    old(run, record, is_logged)
    if record["step"] == 3:
        os.kill(os.getpid(), signal.SIGTERM)
loop.MetricsLogger.report_record = record
sys.argv[0] = "sinklab"
from sinklab.__main__ import run
run()'"""


def run_shell(command: str) -> tuple[int, str]:
    """Return the exit code of the first command of a pipe, and the standard error of the shell."""
    process = subprocess.run(
        ['bash', '-c', f'{command}; exit ${{PIPESTATUS[0]}}'], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    return process.returncode, process.stderr.decode()


@pytest.mark.slow
@pytest.mark.parametrize(
    ('program', 'streams', 'code', 'kind'),
    [
        pytest.param(SINKLAB, '2>/dev/full', 0, 'done', marks=pytest.mark.exhaustive),
        (SINKLAB, '>/dev/full 2>&1', 0, 'done'),
        (SINKLAB, '2>&1 | head -1', 0, 'done'),
        (SINKLAB, '>&- 2>&-', 0, 'done'),
        pytest.param(SIGNALLED_SINKLAB, '2>/dev/full', 143, 'stopped', marks=pytest.mark.exhaustive),
        (SIGNALLED_SINKLAB, '2>&-', 143, 'stopped'),
        pytest.param(SIGNALLED_SINKLAB, '2>&1 | head -1', 143, 'stopped', marks=pytest.mark.exhaustive),
    ],
)
def test_unwritable_log_does_not_change_run(config, tmp_path, program, streams, code, kind):
    command = f'{program} train --config={config} --workdir={tmp_path}/run {streams}'
    assert run_shell(command)[0] == code
    folder = RunDir(tmp_path / 'run')
    assert read_outcome(folder.path)['kind'] == kind
    assert read_outcome(folder.path)['checkpoint'] == folder.read_records()[-1]['step']


@pytest.mark.slow
def test_closed_pipe_is_no_error():
    assert run_shell(f'{SINKLAB} rows | head -1') == (0, '')
    assert run_shell(f'{SINKLAB} --help | true') == (0, '')


@pytest.mark.slow
def test_unwritable_result_is_error_with_one_line():
    code, stderr = run_shell(f'{SINKLAB} rows >/dev/full')
    assert code == 1
    assert len(stderr.splitlines()) == 1
    assert 'No space left' in stderr


class BrokenStream(io.StringIO):
    """Stream on which every write fails."""

    def __init__(self, error_number):
        super().__init__()
        self.error_number = error_number

    def write(self, text):
        raise OSError(self.error_number, os.strerror(self.error_number))


@pytest.mark.slow
def test_unwritable_table_does_not_change_sweep_outcome(config, tmp_path):
    command = f'{SINKLAB} sweep --config={config} --workdir={tmp_path} --rows=a'
    Path(config).write_text(Path(config).read_text() + "\nROWS = {'a': dict(diff={}, published={}, source='here')}\n")
    assert run_shell(f'{command} >/dev/full')[0] == 0
    assert [row['outcome'] for row in json.loads((tmp_path / 'sweep.json').read_text())] == ['done 1/1']


@pytest.mark.slow
@pytest.mark.parametrize('signal_number', [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_blocked_stderr_does_not_delay_exit_by_signal(signal_number):
    script = 'import signal, time\nfrom sinklab import standard_streams, startup_signals\n'
    script += 'signal.signal(signal.SIGHUP, signal.SIG_DFL)\nstandard_streams.install_safe_streams()\n'
    script += 'signal.signal(signal.SIGINT, signal.default_int_handler)\n'
    script += 'startup_signals.install_signal_handlers("verb")\n'
    script += 'print("ready", flush=True)\nimport os\nos.set_blocking(2, False)\n'
    script += 'try:\n  while True: os.write(2, b"x" * 4096)\nexcept BlockingIOError: os.set_blocking(2, True)\n'
    script += 'print("full", flush=True)\ntime.sleep(60)'
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with subprocess.Popen([sys.executable, '-c', script], **pipes) as process:
        assert process.stdout.readline() == b'ready\n'
        assert process.stdout.readline() == b'full\n'
        process.send_signal(signal_number)
        assert process.wait(20) == (130 if signal_number == signal.SIGINT else -signal_number)


def test_safe_stream_keeps_disk_error_and_raises_on_terminal_hangup():
    stream = standard_streams.SafeStream(BrokenStream(errno.EIO), is_result=True)
    stream.write('abc')
    assert stream.error.errno == errno.EIO
    terminal = BrokenStream(errno.EIO)
    terminal.isatty = lambda: True
    with pytest.raises(standard_streams.OutputClosedError):
        standard_streams.SafeStream(terminal, is_result=True).write('abc')


@pytest.mark.parametrize('error_number', [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EPIPE, errno.EAGAIN])
def test_safe_stream_on_stderr_never_raises(error_number):
    stream = standard_streams.SafeStream(BrokenStream(error_number))
    assert stream.write('abc') == 3
    stream.writelines(['a', 'b'])
    stream.flush()


def test_safe_stream_raises_on_closed_pipe_and_keeps_full_disk_error():
    with pytest.raises(standard_streams.OutputClosedError):
        standard_streams.SafeStream(BrokenStream(errno.EPIPE), is_result=True).write('abc')
    stream = standard_streams.SafeStream(BrokenStream(errno.ENOSPC), is_result=True)
    stream.write('abc')
    assert stream.error.errno == errno.ENOSPC
