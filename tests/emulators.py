"""Emulators of GCS and S3 on this machine, behind a proxy that records requests and injects faults."""

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

READY_SECONDS = 60.0  # until an emulator answers
CONNECTION_BACKLOG = 1024  # pending connections; beyond the default of 5, each is retried after 1, 3, 7, 15 s


def serve_gcs(port: int) -> None:
    import emulated_gcs

    emulated_gcs.serve(port, CONNECTION_BACKLOG)


def serve_s3(port: int) -> None:
    from moto.server import main

    main(['-H', '127.0.0.1', '-p', str(port)])


def make_gcs_bucket(port: int, name: str) -> None:
    send_request(
        port, 'POST', '/storage/v1/b?project=p', json.dumps({'name': name}), {'Content-Type': 'application/json'}
    )


def make_s3_bucket(port: int, name: str) -> None:
    send_request(port, 'PUT', f'/{name}')


def send_request(port: int, method: str, path: str, body: str = '', headers: dict | None = None) -> int:
    connection = http.client.HTTPConnection('127.0.0.1', port, timeout=30)
    connection.request(method, path, body, headers or {})
    return connection.getresponse().status


def get_gcs_variables(url: str) -> dict[str, str]:
    """Return the variables by which gcsfs, Orbax and TensorStore find the emulator, and send no token."""
    endpoint = dict.fromkeys(('STORAGE_EMULATOR_HOST', 'TENSORSTORE_GCS_HTTP_URL'), url)
    return endpoint | dict(GOOGLE_AUTH_TOKEN_FOR_TESTING='none')


def get_s3_variables(url: str) -> dict[str, str]:
    account = dict(AWS_ACCESS_KEY_ID='a', AWS_SECRET_ACCESS_KEY='b', AWS_DEFAULT_REGION='us-east-1')
    return dict(AWS_ENDPOINT_URL=url, **account)


@dataclasses.dataclass(frozen=True)
class EmulatorType:
    serve: Callable[[int], None]
    make_bucket: Callable[[int, str], None]
    get_variables: Callable[[str], dict[str, str]]


EMULATOR_TYPES = {
    'gs': EmulatorType(serve_gcs, make_gcs_bucket, get_gcs_variables),
    's3': EmulatorType(serve_s3, make_s3_bucket, get_s3_variables),
}


@dataclasses.dataclass(frozen=True)
class Request:
    method: str
    path: str  # with its query, decoded
    request_bytes: int  # size of the body
    response_bytes: int

    object_names: tuple[str, ...] = ()  # names of objects in the body

    @property
    def is_write(self) -> bool:
        return self.method not in ('GET', 'HEAD')

    @property
    def path_and_names(self) -> str:
        return ' '.join((self.path, *self.object_names))


@dataclasses.dataclass
class Answer:
    """Treatment of a request that the proxy does not simply forward."""

    status: int | None = None  # replaces the status of the storage
    text: str = ''  # body for `status`
    delay_seconds: float = 0.0  # delay before the answer
    max_sent_bytes: int | None = None  # bytes of the content sent before the connection is closed
    close_delay_seconds: float = 0.0  # delay before the connection is closed
    is_dropped: bool = False  # the storage receives the request, but its answer is dropped
    max_read_bytes: int | None = None  # bytes of the body read before the connection is closed; the storage gets none


Rule = Callable[[str, str], Answer | None]  # takes the method and the path of a request


class Proxy:
    """Proxy of an emulator that records all requests and applies rules to them."""

    def __init__(self, emulator_port: int):
        self.requests: list[Request] = []
        self.rules: list[Rule] = []
        self.lock = threading.Lock()
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
        answer = next(filter(None, (rule(handler.command, path) for rule in self.rules)), Answer())
        if answer.max_read_bytes is not None:
            handler.rfile.read(min(answer.max_read_bytes, int(handler.headers.get('Content-Length') or 0)))
            time.sleep(answer.close_delay_seconds)
            self.requests.append(Request(handler.command, path, answer.max_read_bytes, 0))
            drop_connection(handler)
            return
        body = read_body(handler)
        time.sleep(answer.delay_seconds)
        if answer.status:
            status, headers, content = answer.status, [], answer.text.encode()
        else:
            status, headers, content = self.forward(handler, emulator_port, body)
        self.requests.append(Request(handler.command, path, len(body), len(content), find_object_names(path, body)))
        if answer.is_dropped:
            drop_connection(handler)
            return
        handler.send_response(status)
        for name, value in headers:
            if name.lower() not in ('transfer-encoding', 'content-length', 'connection', 'server', 'date'):
                handler.send_header(name, value)
        length = next((value for name, value in headers if name.lower() == 'content-length'), None)
        handler.send_header('Content-Length', length if handler.command == 'HEAD' and length else str(len(content)))
        handler.end_headers()
        if handler.command != 'HEAD':
            handler.wfile.write(content[: answer.max_sent_bytes])
        if answer.max_sent_bytes is not None and len(content) > answer.max_sent_bytes:
            handler.wfile.flush()
            time.sleep(answer.close_delay_seconds)
            drop_connection(handler)

    def forward(self, handler: http.server.BaseHTTPRequestHandler, emulator_port: int, body: bytes) -> tuple:
        """Forward a request, and return (status, headers, content) of the answer.

        Conditional requests run one at a time, because moto does not make them atomic.
        """
        sent_headers = {name: value for name, value in handler.headers.items() if name.lower() != 'transfer-encoding'}
        with self.lock if {'If-Match', 'If-None-Match'} & sent_headers.keys() else contextlib.nullcontext():
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

    def count_requests(self, path: str = '', **fields: object) -> int:
        """Count the requests whose path contains a text and whose fields have the given values."""
        return len(self.find_requests(path, **fields))

    def find_requests(self, path: str = '', **fields: object) -> list[Request]:
        return [
            request
            for request in self.requests
            if path in request.path and all(getattr(request, name) == value for name, value in fields.items())
        ]


def find_object_names(path: str, body: bytes) -> tuple[str, ...]:
    """Return the objects that the body of a request names: one that is uploaded, or several that are deleted."""
    if 'uploadType=multipart' in path:
        matches = re.findall(rb'"name": "([^"]+)"', body[:1000])
    else:
        matches = re.findall(b'<Key>([^<]+)</Key>', body) if path.endswith('?delete') else []
    return tuple(name.decode() for name in matches)


def drop_connection(handler: http.server.BaseHTTPRequestHandler) -> None:
    handler.close_connection = True
    handler.connection.shutdown(socket.SHUT_RDWR)


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

    url: str  # gs://NAME or s3://NAME
    proxy: Proxy
    variables: dict[str, str]  # by which the libraries find the bucket


class Emulators:
    """Emulators of a session of tests, each started at its first use."""

    def __init__(self):
        self.running: dict[str, tuple[int, Proxy, subprocess.Popen]] = {}
        self.bucket_counts: collections.Counter[str] = collections.Counter()

    def start(self, scheme: str) -> tuple[int, Proxy, subprocess.Popen]:
        with socket.socket() as listener:
            listener.bind(('127.0.0.1', 0))
            port = listener.getsockname()[1]
        quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        process = subprocess.Popen([sys.executable, __file__, scheme, str(port)], **quiet)
        deadline = time.monotonic() + READY_SECONDS
        while not is_listening(port) and time.monotonic() < deadline:
            time.sleep(0.1)
        return port, Proxy(port), process

    def bucket(self, scheme: str) -> Bucket:
        if scheme not in self.running:
            self.running[scheme] = self.start(scheme)
        port, proxy, _ = self.running[scheme]
        self.bucket_counts[scheme] += 1
        name = f'bucket-{self.bucket_counts[scheme]}'
        EMULATOR_TYPES[scheme].make_bucket(port, name)
        proxy.requests.clear()
        proxy.rules.clear()
        return Bucket(f'{scheme}://{name}', proxy, EMULATOR_TYPES[scheme].get_variables(proxy.url))

    def add_proxy(self, bucket: Bucket) -> Bucket:
        """Return the same bucket behind another proxy, which records its requests separately."""
        scheme = bucket.url.partition(':')[0]
        proxy = Proxy(self.running[scheme][0])
        return Bucket(bucket.url, proxy, EMULATOR_TYPES[scheme].get_variables(proxy.url))

    def close(self) -> None:
        for _, _, process in self.running.values():
            process.send_signal(signal.SIGKILL)
            process.wait()


def is_listening(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(('127.0.0.1', port), timeout=1):
        return True
    return False


if __name__ == '__main__':
    EMULATOR_TYPES[sys.argv[1]].serve(int(sys.argv[2]))
