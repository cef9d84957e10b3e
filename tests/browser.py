"""Control of a page in a headless Chromium through the DevTools protocol over two pipes."""

import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time

import pytest

BROWSER = next(filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome', 'chrome'))), None)
NEEDS_BROWSER = pytest.mark.skipif(BROWSER is None, reason='there is no Chromium, which opens the pages')
FLAGS = [
    *('--headless', '--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--hide-scrollbars'),
    *('--disable-background-networking', '--disable-component-update', '--disable-sync', '--remote-debugging-pipe'),
]
# Chromium reads commands from file descriptor 3 and writes answers to file descriptor 4.
LAUNCH_SCRIPT = 'import os, sys; r, w, *c = sys.argv[1:]; os.dup2(int(r), 3); os.dup2(int(w), 4); os.execv(c[0], c)'
TIMEOUT_SECONDS = 120.0  # seconds until an answer; the machine may be busy


class Page:
    """Browser tab that records its console, evaluates scripts, and receives keys and clicks."""

    def __init__(self, command_fd, answer_fd):
        self.command_fd, self.answer_fd = command_fd, answer_fd
        self.message_id, self.buffer, self.session, self.console = 0, b'', None, []

    def send(self, method, **parameters):
        """Send one command, and return its result. Events that arrive before the result are recorded."""
        self.message_id += 1
        message = dict(id=self.message_id, method=method, params=parameters)
        if self.session:
            message['sessionId'] = self.session
        os.write(self.command_fd, json.dumps(message).encode() + b'\0')
        while True:
            packet = self.receive_message()
            if packet.get('id') == self.message_id:
                assert 'error' not in packet, packet['error']
                return packet['result']
            self.record_event(packet)

    def receive_message(self):
        while b'\0' not in self.buffer:
            assert select.select([self.answer_fd], [], [], TIMEOUT_SECONDS)[0], 'the browser says nothing'
            chunk = os.read(self.answer_fd, 1 << 20)
            assert chunk, 'the browser has ended'
            self.buffer += chunk
        message, _, self.buffer = self.buffer.partition(b'\0')
        return json.loads(message)

    def record_event(self, packet):
        if packet.get('method') in ('Runtime.exceptionThrown', 'Log.entryAdded'):
            self.console.append(packet['params'])
        if packet.get('method') == 'Runtime.consoleAPICalled' and packet['params']['type'] in ('error', 'warning'):
            self.console.append(packet['params'])

    def open(self, path, width=1280, height=900, dark=False):
        """Open a file, and wait until its figures are drawn."""
        if not self.session:
            target = self.send('Target.createTarget', url='about:blank')['targetId']
            self.session = self.send('Target.attachToTarget', targetId=target, flatten=True)['sessionId']
            for domain in ('Page', 'Runtime', 'Log'):
                self.send(f'{domain}.enable')
        self.send(
            'Emulation.setEmulatedMedia',
            features=[dict(name='prefers-color-scheme', value='dark' if dark else 'light')],
        )
        self.resize(width, height)
        self.send('Page.navigate', url=f'file://{path}')
        self.wait_until('document.documentElement?.dataset.drawMilliseconds')
        return self

    def resize(self, width, height=900):
        self.send(
            'Emulation.setDeviceMetricsOverride', width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def evaluate(self, script):
        """Evaluate an expression in the page, and return its value."""
        answer = self.send('Runtime.evaluate', expression=script, returnByValue=True, awaitPromise=True)
        assert 'exceptionDetails' not in answer, answer['exceptionDetails']
        return answer['result'].get('value')

    def wait_until(self, script):
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not self.evaluate(script):
            assert time.monotonic() < deadline, f'never: {script}; {self.console}'
            time.sleep(0.05)

    def wait_for_frames(self):
        """Wait until the browser has drawn two frames."""
        self.evaluate('new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))')

    def click(self, selector):
        self.evaluate(f'document.querySelector({json.dumps(selector)}).click()')
        self.wait_for_frames()


@contextlib.contextmanager
def open_browser(profile):
    """Start a browser with its own profile, and yield a Page."""
    (browser_input, command_fd), (answer_fd, browser_output) = os.pipe(), os.pipe()
    descriptors = [fcntl.fcntl(file, fcntl.F_DUPFD, 10) for file in (browser_input, browser_output)]
    command = [
        sys.executable,
        '-c',
        LAUNCH_SCRIPT,
        *map(str, descriptors),
        BROWSER,
        *FLAGS,
        f'--user-data-dir={profile}',
    ]
    process = subprocess.Popen(command, pass_fds=descriptors, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for file in (browser_input, browser_output, *descriptors):
        os.close(file)
    try:
        yield Page(command_fd, answer_fd)
    finally:
        os.close(command_fd)  # the browser exits when its command pipe closes
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(answer_fd)
