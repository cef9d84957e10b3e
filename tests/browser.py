"""A page in a headless Chromium, driven by DevTools' protocol over two pipes."""

import base64
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
# Chromium reads commands from its third file and writes answers to its fourth.
WRAPPER = 'import os, sys; r, w, *c = sys.argv[1:]; os.dup2(int(r), 3); os.dup2(int(w), 4); os.execv(c[0], c)'
PATIENCE = 120.0  # seconds for an answer, on a machine that has other work


class Page:
    """One tab: what it says on its console, what its script answers, what its keys and clicks do."""

    def __init__(self, commands, answers):
        self.commands, self.answers = commands, answers
        self.number, self.buffer, self.session, self.console = 0, b'', None, []

    def send(self, method, **given):
        """The result of one command; what happens meanwhile is noted."""
        self.number += 1
        message = dict(id=self.number, method=method, params=given)
        if self.session:
            message['sessionId'] = self.session
        os.write(self.commands, json.dumps(message).encode() + b'\0')
        while True:
            heard = self.hear()
            if heard.get('id') == self.number:
                assert 'error' not in heard, heard['error']
                return heard['result']
            self.note(heard)

    def hear(self):
        while b'\0' not in self.buffer:
            assert select.select([self.answers], [], [], PATIENCE)[0], 'the browser says nothing'
            part = os.read(self.answers, 1 << 20)
            assert part, 'the browser has ended'
            self.buffer += part
        message, _, self.buffer = self.buffer.partition(b'\0')
        return json.loads(message)

    def note(self, heard):
        if heard.get('method') in ('Runtime.exceptionThrown', 'Log.entryAdded'):
            self.console.append(heard['params'])
        if heard.get('method') == 'Runtime.consoleAPICalled' and heard['params']['type'] in ('error', 'warning'):
            self.console.append(heard['params'])

    def open(self, path, width=1280, height=900, dark=False):
        """Shows a file, and waits until its figures are drawn."""
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
        self.until('document.documentElement?.dataset.drawn')
        return self

    def resize(self, width, height=900):
        self.send(
            'Emulation.setDeviceMetricsOverride', width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def ask(self, script):
        """What an expression of the page's gives."""
        found = self.send('Runtime.evaluate', expression=script, returnByValue=True, awaitPromise=True)
        assert 'exceptionDetails' not in found, found['exceptionDetails']
        return found['result'].get('value')

    def until(self, script):
        end = time.monotonic() + PATIENCE
        while not self.ask(script):
            assert time.monotonic() < end, f'never: {script}; {self.console}'
            time.sleep(0.05)

    def settle(self):
        """Until what was asked for is drawn."""
        self.ask('new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))')

    def press(self, key, text=''):
        more = dict(text=text) if text else {}
        self.send(
            'Input.dispatchKeyEvent',
            type='keyDown',
            key=key,
            code=key,
            **more,
            windowsVirtualKeyCode=CODES.get(key, 0),
        )
        self.send('Input.dispatchKeyEvent', type='keyUp', key=key, code=key, windowsVirtualKeyCode=CODES.get(key, 0))
        self.settle()

    def click(self, selector):
        self.ask(f'document.querySelector({json.dumps(selector)}).click()')
        self.settle()

    def picture(self, path):
        """The whole page as a PNG file."""
        size = self.send('Page.getLayoutMetrics')['cssContentSize']
        clip = dict(x=0, y=0, width=size['width'], height=min(size['height'], 12000), scale=1)
        found = self.send('Page.captureScreenshot', clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found['data']))


CODES = dict(ArrowLeft=37, ArrowUp=38, ArrowRight=39, ArrowDown=40, Enter=13, Tab=9, Home=36, End=35)


@contextlib.contextmanager
def browser(profile):
    """A Page of a browser of its own."""
    (theirs_in, commands), (answers, theirs_out) = os.pipe(), os.pipe()
    given = [fcntl.fcntl(file, fcntl.F_DUPFD, 10) for file in (theirs_in, theirs_out)]
    command = [sys.executable, '-c', WRAPPER, *map(str, given), BROWSER, *FLAGS, f'--user-data-dir={profile}']
    process = subprocess.Popen(command, pass_fds=given, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for file in (theirs_in, theirs_out, *given):
        os.close(file)
    try:
        yield Page(commands, answers)
    finally:
        os.close(commands)  # at which it ends
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(answers)
