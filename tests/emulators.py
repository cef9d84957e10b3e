"""Emulator of GCS on this machine, behind a proxy that records requests and injects faults."""

import contextlib
import dataclasses
import http.client
import http.server
import json
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator

import pytest
from etils.epath import backend as epath_backend

READY_SECONDS = 60.0  # until an emulator answers
CONNECTION_BACKLOG = 1024  # pending connections; beyond the default of 5, each is retried after 1, 3, 7, 15 s


def make_bucket(port: int, name: str) -> None:
    connection = http.client.HTTPConnection('127.0.0.1', port, timeout=30)
    headers = {'Content-Type': 'application/json'}
    connection.request('POST', '/storage/v1/b?project=p', json.dumps({'name': name}), headers)
    connection.getresponse().read()


def get_variables(url: str) -> dict[str, str]:
    """Return the variables by which gcsfs, Orbax and TensorStore find the emulator, and send no token."""
    endpoint = dict.fromkeys(('STORAGE_EMULATOR_HOST', 'TENSORSTORE_GCS_HTTP_URL'), url)
    return endpoint | dict(GOOGLE_AUTH_TOKEN_FOR_TESTING='none')


@dataclasses.dataclass(frozen=True)
class Request:
    method: str
    path: str  # with its query, decoded


@dataclasses.dataclass
class Answer:
    """Answer to a request that the proxy does not forward."""

    status: int


Rule = Callable[[str, str], Answer | None]  # takes the method and the path of a request


class Proxy:
    """Proxy of an emulator that records all requests and applies rules to them."""

    def __init__(self, emulator_port: int):
        self.requests: list[Request] = []
        self.rules: list[Rule] = []
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = 'HTTP/1.1'

            def handle_in_proxy(self) -> None:
                proxy.handle(self, emulator_port)

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_PATCH = handle_in_proxy

            def log_message(self, *_) -> None:
                pass

        class Server(http.server.ThreadingHTTPServer):
            request_queue_size = CONNECTION_BACKLOG

            def handle_error(self, *_) -> None:
                pass  # a client was killed, or closed its connection

        self.server = Server(('127.0.0.1', 0), Handler)
        self.server.daemon_threads = True
        self.url = f'http://127.0.0.1:{self.server.server_address[1]}'
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def handle(self, handler: http.server.BaseHTTPRequestHandler, emulator_port: int) -> None:
        path = urllib.parse.unquote(handler.path)
        answer = next(filter(None, (rule(handler.command, path) for rule in self.rules)), None)
        body = read_body(handler)
        status, headers, content = (answer.status, [], b'') if answer else self.forward(handler, emulator_port, body)
        self.requests.append(Request(handler.command, path))
        handler.send_response(status)
        for name, value in headers:
            if name.lower() not in ('transfer-encoding', 'content-length', 'connection', 'server', 'date'):
                handler.send_header(name, value)
        length = next((value for name, value in headers if name.lower() == 'content-length'), None)
        handler.send_header('Content-Length', length if handler.command == 'HEAD' and length else str(len(content)))
        handler.end_headers()
        if handler.command != 'HEAD':
            handler.wfile.write(content)

    def forward(self, handler: http.server.BaseHTTPRequestHandler, emulator_port: int, body: bytes) -> tuple:
        """Forward a request, and return (status, headers, content) of the answer."""
        sent_headers = {name: value for name, value in handler.headers.items() if name.lower() != 'transfer-encoding'}
        connection = http.client.HTTPConnection('127.0.0.1', emulator_port, timeout=300)
        connection.request(handler.command, handler.path, body, sent_headers)
        response = connection.getresponse()
        answer = response.status, response.getheaders(), response.read()
        connection.close()
        return answer

    @contextlib.contextmanager
    def apply_rule(self, rule: Rule) -> Iterator[None]:
        self.rules.insert(0, rule)
        try:
            yield
        finally:
            self.rules.remove(rule)


def read_body(handler: http.server.BaseHTTPRequestHandler) -> bytes:
    """Read the body of a request, in one piece or in chunks."""
    if 'chunked' not in handler.headers.get('Transfer-Encoding', ''):
        return handler.rfile.read(int(handler.headers.get('Content-Length') or 0))
    content = b''
    while size := int(handler.rfile.readline().split(b';')[0], 16):
        content += handler.rfile.read(size)
        handler.rfile.readline()
    handler.rfile.readline()
    return content


@dataclasses.dataclass
class Bucket:
    """Bucket of a single test."""

    url: str  # gs://NAME
    proxy: Proxy
    variables: dict[str, str]  # by which the libraries find the bucket


class Emulator:
    """Emulator of a session of tests, which starts when the first bucket is made."""

    def __init__(self):
        self.port, self.num_buckets = 0, 0
        self.proxy: Proxy | None = None
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        with socket.socket() as listener:
            listener.bind(('127.0.0.1', 0))
            self.port = listener.getsockname()[1]
        quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.process = subprocess.Popen([sys.executable, __file__, str(self.port)], **quiet)
        deadline = time.monotonic() + READY_SECONDS
        while not is_listening(self.port) and time.monotonic() < deadline:
            time.sleep(0.1)
        self.proxy = Proxy(self.port)

    def make_bucket(self) -> Bucket:
        if self.process is None:
            self.start()
        self.num_buckets += 1
        name = f'bucket-{self.num_buckets}'
        make_bucket(self.port, name)
        self.proxy.requests.clear()
        self.proxy.rules.clear()
        return Bucket(f'gs://{name}', self.proxy, get_variables(self.proxy.url))

    def close(self) -> None:
        if self.process:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()


def is_listening(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(('127.0.0.1', port), timeout=1):
        return True
    return False


if __name__ == '__main__':
    import emulated_gcs

    emulated_gcs.serve(int(sys.argv[1]), CONNECTION_BACKLOG)


@pytest.fixture(scope='session')
def emulator() -> Iterator[Emulator]:
    session_emulator = Emulator()
    yield session_emulator
    session_emulator.close()


@pytest.fixture
def bucket(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """Make a bucket, and set the environment variables by which all processes find it."""
    new_bucket = emulator.make_bucket()
    epath_backend.fsspec_backend._get_filesystem.cache_clear()  # it keeps the token of an earlier environment
    for name, value in new_bucket.variables.items():
        monkeypatch.setenv(name, value)
    return new_bucket
