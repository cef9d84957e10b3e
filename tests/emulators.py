"""Object storage on this machine: emulators of GCS and S3, behind a proxy that counts, and fails as it is told."""

import collections
import contextlib
import dataclasses
import http.client
import http.server
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator

READY = 60.0  # seconds until an emulator answers
WAITING = 1024  # connections that are not taken yet; beyond Python's 5 each is tried again after 1, 3, 7, 15 s


def gcs(port: int) -> None:
    import emulated_gcs

    emulated_gcs.serve(port, WAITING)


def s3(port: int) -> None:
    from moto.server import main

    main(['-H', '127.0.0.1', '-p', str(port)])


def gcs_bucket(port: int, name: str) -> None:
    asked(port, 'POST', '/storage/v1/b?project=p', json.dumps({'name': name}), {'Content-Type': 'application/json'})


def s3_bucket(port: int, name: str) -> None:
    asked(port, 'PUT', f'/{name}')


def asked(port: int, method: str, path: str, body: str = '', headers: dict | None = None) -> int:
    connection = http.client.HTTPConnection('127.0.0.1', port, timeout=30)
    connection.request(method, path, body, headers or {})
    return connection.getresponse().status


def gcs_variables(url: str) -> dict[str, str]:
    """By which the libraries find the emulator: gcsfs and Orbax, TensorStore, and one that asks for no token."""
    endpoint = dict.fromkeys(('STORAGE_EMULATOR_HOST', 'TENSORSTORE_GCS_HTTP_URL'), url)
    return endpoint | dict(GOOGLE_AUTH_TOKEN_FOR_TESTING='none')


def s3_variables(url: str) -> dict[str, str]:
    account = dict(AWS_ACCESS_KEY_ID='a', AWS_SECRET_ACCESS_KEY='b', AWS_DEFAULT_REGION='us-east-1')
    return dict(AWS_ENDPOINT_URL=url, **account)


@dataclasses.dataclass(frozen=True)
class Kind:
    serve: Callable[[int], None]
    bucket: Callable[[int, str], None]
    variables: Callable[[str], dict[str, str]]


KINDS = {'gs': Kind(gcs, gcs_bucket, gcs_variables), 's3': Kind(s3, s3_bucket, s3_variables)}


@dataclasses.dataclass(frozen=True)
class Request:
    method: str
    path: str  # with its query, as it is written there
    sent: int  # bytes
    received: int

    names: tuple[str, ...] = ()  # of the objects, where its path has none

    @property
    def writes(self) -> bool:
        return self.method not in ('GET', 'HEAD')

    @property
    def named(self) -> str:
        return ' '.join((self.path, *self.names))


@dataclasses.dataclass
class Answer:
    """What the proxy does with a request, if it is not simply passed on."""

    status: int | None = None  # instead of the storage's
    text: str = ''  # with that
    seconds: float = 0.0  # before it is answered
    bytes: int | None = None  # of the content, before the connection is lost
    stalls: float = 0.0  # seconds until then
    lost: bool = False  # the storage has heard it, and its answer never comes
    taken: int | None = None  # bytes of what is sent, before the connection is lost and the storage has heard nothing


Rule = Callable[[str, str], Answer | None]  # of the method and the path of a request


class Proxy:
    """Stands before an emulator: notes all requests, and treats them as its rules say."""

    def __init__(self, to: int):
        self.requests: list[Request] = []
        self.rules: list[Rule] = []
        self.alone = threading.Lock()
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = 'HTTP/1.1'

            def handle_one(self) -> None:
                proxy.handle(self, to)

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_PATCH = handle_one

            def log_message(self, *_) -> None:
                pass

        class Server(http.server.ThreadingHTTPServer):
            request_queue_size = WAITING

            def handle_error(self, *_) -> None:
                pass  # a client that was killed, or has heard enough

        self.server = Server(('127.0.0.1', 0), Handler)
        self.server.daemon_threads = True
        self.url = f'http://127.0.0.1:{self.server.server_address[1]}'
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def handle(self, handler: http.server.BaseHTTPRequestHandler, to: int) -> None:
        path = urllib.parse.unquote(handler.path)
        answer = next(filter(None, (rule(handler.command, path) for rule in self.rules)), Answer())
        if answer.taken is not None:
            handler.rfile.read(min(answer.taken, int(handler.headers.get('Content-Length') or 0)))
            time.sleep(answer.stalls)
            self.requests.append(Request(handler.command, path, answer.taken, 0))
            lose(handler)
            return
        body = content_of(handler)
        time.sleep(answer.seconds)
        if answer.status:
            status, headers, content = answer.status, [], answer.text.encode()
        else:
            status, headers, content = self.passed_on(handler, to, body)
        self.requests.append(Request(handler.command, path, len(body), len(content), told(path, body)))
        if answer.lost:
            lose(handler)
            return
        handler.send_response(status)
        for name, value in headers:
            if name.lower() not in ('transfer-encoding', 'content-length', 'connection', 'server', 'date'):
                handler.send_header(name, value)
        length = next((value for name, value in headers if name.lower() == 'content-length'), None)
        handler.send_header('Content-Length', length if handler.command == 'HEAD' and length else str(len(content)))
        handler.end_headers()
        if handler.command != 'HEAD':
            handler.wfile.write(content[: answer.bytes])
        if answer.bytes is not None and len(content) > answer.bytes:
            handler.wfile.flush()
            time.sleep(answer.stalls)
            lose(handler)

    def passed_on(self, handler: http.server.BaseHTTPRequestHandler, to: int, body: bytes) -> tuple:
        """(status, headers, content) of the storage's answer. Conditions are kept one by one, as moto does not."""
        given = {name: value for name, value in handler.headers.items() if name.lower() != 'transfer-encoding'}
        with self.alone if {'If-Match', 'If-None-Match'} & given.keys() else contextlib.nullcontext():
            connection = http.client.HTTPConnection('127.0.0.1', to, timeout=300)
            connection.request(handler.command, handler.path, body, given)
            response = connection.getresponse()
            answer = response.status, response.getheaders(), response.read()
            connection.close()
        return answer

    @contextlib.contextmanager
    def treating(self, rule: Rule) -> Iterator[None]:
        self.rules.insert(0, rule)
        try:
            yield
        finally:
            self.rules.remove(rule)

    def count(self, path: str = '', **what: object) -> int:
        """Of requests whose path holds a text, and whose fields are as given."""
        return len(self.found(path, **what))

    def found(self, path: str = '', **what: object) -> list[Request]:
        return [
            request
            for request in self.requests
            if path in request.path and all(getattr(request, name) == value for name, value in what.items())
        ]


def told(path: str, body: bytes) -> tuple[str, ...]:
    """The objects that a request names in what it sends: one that is uploaded, or many that are deleted."""
    if 'uploadType=multipart' in path:
        found = re.findall(rb'"name": "([^"]+)"', body[:1000])
    else:
        found = re.findall(b'<Key>([^<]+)</Key>', body) if path.endswith('?delete') else []
    return tuple(name.decode() for name in found)


def lose(handler: http.server.BaseHTTPRequestHandler) -> None:
    handler.close_connection = True
    handler.connection.shutdown(socket.SHUT_RDWR)


def content_of(handler: http.server.BaseHTTPRequestHandler) -> bytes:
    """The body of a request, in one piece or in chunks."""
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
    """A bucket of its own for a test."""

    url: str  # gs://NAME or s3://NAME
    proxy: Proxy
    variables: dict[str, str]  # by which the libraries find it


class Emulators:
    """Those of a session of tests, started when they are first needed."""

    def __init__(self):
        self.running: dict[str, tuple[int, Proxy, subprocess.Popen]] = {}
        self.made: collections.Counter[str] = collections.Counter()

    def start(self, scheme: str) -> tuple[int, Proxy, subprocess.Popen]:
        with socket.socket() as free:
            free.bind(('127.0.0.1', 0))
            port = free.getsockname()[1]
        quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        process = subprocess.Popen([sys.executable, __file__, scheme, str(port)], **quiet)
        until = time.monotonic() + READY
        while not answers(port) and time.monotonic() < until:
            time.sleep(0.1)
        return port, Proxy(port), process

    def bucket(self, scheme: str) -> Bucket:
        if scheme not in self.running:
            self.running[scheme] = self.start(scheme)
        port, proxy, _ = self.running[scheme]
        self.made[scheme] += 1
        name = f'bucket-{self.made[scheme]}'
        KINDS[scheme].bucket(port, name)
        proxy.requests.clear()
        proxy.rules.clear()
        return Bucket(f'{scheme}://{name}', proxy, KINDS[scheme].variables(proxy.url))

    def another(self, bucket: Bucket) -> Bucket:
        """The same bucket by a way of its own, whose requests are counted apart."""
        scheme = bucket.url.partition(':')[0]
        proxy = Proxy(self.running[scheme][0])
        return Bucket(bucket.url, proxy, KINDS[scheme].variables(proxy.url))

    def close(self) -> None:
        for _, _, process in self.running.values():
            process.send_signal(signal.SIGKILL)
            process.wait()


def answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(('127.0.0.1', port), timeout=1):
        return True
    return False


if __name__ == '__main__':
    KINDS[sys.argv[1]].serve(int(sys.argv[2]))
