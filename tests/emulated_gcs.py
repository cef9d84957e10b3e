"""Extensions of gcp-storage-emulator.

They add generations, conditions on generations, and exact bytes.
"""

import functools
import json
import re
import threading
from collections.abc import Callable
from http import HTTPStatus

from gcp_storage_emulator import server, storage
from gcp_storage_emulator.exceptions import NotFound

WRITE_LOCK = threading.Lock()  # keeps a condition true until its write is done


def get_generation(storage, bucket: str, name: str) -> str:
    try:
        return storage.get_file_obj(bucket, name)['generation']
    except NotFound:
        return '0'


def get_object_name(request) -> str | None:
    """Return the name of the object of a request. An upload names it in its query or in its first part."""
    if 'object_id' in request.params:
        return request.params['object_id']
    if request.query.get('name'):
        return request.query['name'][0]
    metadata = request.data if request.query.get('uploadType') else None
    return metadata.get('meta', metadata).get('name') if isinstance(metadata, dict) else None


def handle_request(handler: Callable, request, response, storage, *arguments, **options) -> None:
    """Handle a request with its conditions, and add the resulting generation to the answer."""
    bucket, name = request.params.get('bucket_name'), get_object_name(request)
    current = get_generation(storage, bucket, name) if bucket and name else '0'
    match, no_match = (request.query.get(f'ifGeneration{suffix}', [None])[0] for suffix in ('Match', 'NotMatch'))
    if match not in (None, current):
        response.status = HTTPStatus.PRECONDITION_FAILED
        response.json({'error': {'code': 412, 'message': 'conditionNotMet'}})
    elif no_match == current != '0':
        response.status = HTTPStatus.NOT_MODIFIED
    else:
        handler(request, response, storage, *arguments, **options)
        if bucket and name:
            response['x-goog-generation'] = get_generation(storage, bucket, name)


def extend_handler(handler: Callable) -> Callable:
    def handle_with_lock(*arguments, **options) -> None:
        with WRITE_LOCK:
            handle_request(handler, *arguments, **options)

    return handle_with_lock


def parse_exactly(parse: Callable, handler, query) -> dict | list | bytes | None:
    """Parse a multipart body exactly. The emulator drops line ends at the end of a part."""
    content_type = handler.headers.get('Content-Type') or ''
    if not content_type.startswith('multipart/related'):
        return parse(handler, query)
    raw_body = server._decode_raw_data(server._read_raw_data(handler), handler)
    boundary = re.search('boundary="?([^";]+)', content_type)[1].encode()
    _, metadata_part, content_part = raw_body.split(b'--' + boundary, 2)
    line_end = b'\r\n' if content_part.startswith(b'\r\n') else b'\n'
    headers, content = content_part.split(2 * line_end, 1)
    metadata, content = (
        metadata_part.split(2 * line_end, 1)[1],
        content[: content.rindex(line_end + b'--' + boundary)],
    )
    return {'meta': json.loads(metadata), 'content': content, 'content-type': headers.decode().split(':')[1].strip()}


def serve(port: int, backlog: int) -> None:
    server._read_data = functools.partial(parse_exactly, server._read_data)
    server.HANDLERS = tuple(
        (regex, {method: extend_handler(handler) for method, handler in handlers.items()})
        for regex, handlers in server.HANDLERS
    )
    # The emulator would write its whole state at each change, and requests of a long session would take ten times
    # as long.
    storage.Storage._write_config_to_file = lambda _: None
    server.server.HTTPServer.request_queue_size = backlog
    server.Server('127.0.0.1', port, in_memory=True).run()
