"""Extensions of gcp-storage-emulator.

They add generations, conditions on generations, exact bytes, and uploads whose parts can be sent again.
"""

import functools
import json
import re
import threading
from collections.abc import Callable
from http import HTTPStatus

from gcp_storage_emulator import server, storage
from gcp_storage_emulator.exceptions import NotFound
from gcp_storage_emulator.handlers import objects

WRITE_LOCK = threading.Lock()  # keeps a condition true until its write is done
INCOMPLETE_UPLOADS: dict[str, bytearray] = {}  # content of incomplete uploads
FINAL_ANSWERS: dict[str, dict] = {}  # answers to the last parts of complete uploads


def accept_part(request, response, storage) -> None:
    """Accept a part of an upload, as https://cloud.google.com/storage/docs/performing-resumable-uploads specifies.

    Bytes that are already stored may be sent again, and are ignored. The emulator would refuse them. If nothing is
    stored, the answer has no range. The emulator would say that byte 0 is stored. A complete upload gives its last
    answer again. The emulator would forget the upload.
    """
    upload = request.query['upload_id'][0]
    if upload in FINAL_ANSWERS:
        response.json(FINAL_ANSWERS[upload])
        return
    content_range = objects._parse_resumable_content_range(request.get_header('Content-Range', ''))
    stored, content = INCOMPLETE_UPLOADS.setdefault(upload, bytearray()), request.data or b''
    try:
        meta = storage.get_resumable_file_obj(upload)
    except NotFound:
        response.status = HTTPStatus.NOT_FOUND
        return
    if content_range['start'] is not None and content_range['start'] <= len(stored):
        stored += content[len(stored) - content_range['start'] :]
    if content_range['total'] == len(stored):
        objects._finalize_resumable_object(response, storage, meta, bytes(stored), upload)
        FINAL_ANSWERS[upload] = json.loads(response._content)
        del INCOMPLETE_UPLOADS[upload]
        return
    response.status = objects.GoogleHTTPStatus.RESUME_INCOMPLETE
    if stored:
        response['Range'] = f'bytes=0-{len(stored) - 1}'


def cancel_upload(request, response, storage) -> None:
    """Cancel an upload. The documentation specifies status 499, for which Python has no name."""
    upload = request.query['upload_id'][0]
    INCOMPLETE_UPLOADS.pop(upload, None)
    storage.delete_resumable_file_obj(upload)
    response.status = HTTPStatus.NO_CONTENT


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
    if 'upload_id' in request.query:
        (cancel_upload if request.method == 'DELETE' else accept_part)(request, response, storage)
    elif match not in (None, current):
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
    def get_extra_handlers(regex: str) -> list:
        return [('DELETE', cancel_upload)] if regex.startswith('^/upload/') else []

    server._read_data = functools.partial(parse_exactly, server._read_data)
    server.HANDLERS = tuple(
        (
            regex,
            {method: extend_handler(handler) for method, handler in [*handlers.items(), *get_extra_handlers(regex)]},
        )
        for regex, handlers in server.HANDLERS
    )
    # The emulator would write its whole state at each change, and requests of a long session would take ten times
    # as long.
    storage.Storage._write_config_to_file = lambda _: None
    server.server.HTTPServer.request_queue_size = backlog
    server.Server('127.0.0.1', port, in_memory=True).run()
