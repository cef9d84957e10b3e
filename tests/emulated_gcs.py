"""gcp-storage-emulator, and what the storage has beside: generations, conditions on them, exact bytes, and uploads
whose parts can be sent again."""

import functools
import json
import re
import threading
from collections.abc import Callable
from http import HTTPStatus

from gcp_storage_emulator import server, storage
from gcp_storage_emulator.exceptions import NotFound
from gcp_storage_emulator.handlers import objects

ALONE = threading.Lock()  # a condition holds until the write that it is for
HELD: dict[str, bytearray] = {}  # of uploads that are not whole
ENDED: dict[str, dict] = {}  # what was answered to the last part of an upload


def part(request, response, storage) -> None:
    """A part of an upload, as https://cloud.google.com/storage/docs/performing-resumable-uploads has it.

    Bytes that are kept already may be sent again, and are passed over; the emulator refuses them. Where nothing is
    kept, the answer has no range; the emulator says that byte 0 is. An upload that is whole answers as it did at its
    end; the emulator forgets it.
    """
    upload = request.query['upload_id'][0]
    if upload in ENDED:
        response.json(ENDED[upload])
        return
    said = objects._parse_resumable_content_range(request.get_header('Content-Range', ''))
    held, content = HELD.setdefault(upload, bytearray()), request.data or b''
    try:
        meta = storage.get_resumable_file_obj(upload)
    except NotFound:
        response.status = HTTPStatus.NOT_FOUND
        return
    if said['start'] is not None and said['start'] <= len(held):
        held += content[len(held) - said['start'] :]
    if said['total'] == len(held):
        objects._finalize_resumable_object(response, storage, meta, bytes(held), upload)
        ENDED[upload] = json.loads(response._content)
        del HELD[upload]
        return
    response.status = objects.GoogleHTTPStatus.RESUME_INCOMPLETE
    if held:
        response['Range'] = f'bytes=0-{len(held) - 1}'


def cancelled(request, response, storage) -> None:
    """An upload that is given up: the documentation has it answered with 499, which Python has no name for."""
    upload = request.query['upload_id'][0]
    HELD.pop(upload, None)
    storage.delete_resumable_file_obj(upload)
    response.status = HTTPStatus.NO_CONTENT


def generation(storage, bucket: str, name: str) -> str:
    try:
        return storage.get_file_obj(bucket, name)['generation']
    except NotFound:
        return '0'


def named(request) -> str | None:
    """The object of a request; an upload names it in its query or in the first of its parts."""
    if 'object_id' in request.params:
        return request.params['object_id']
    if request.query.get('name'):
        return request.query['name'][0]
    said = request.data if request.query.get('uploadType') else None
    return said.get('meta', said).get('name') if isinstance(said, dict) else None


def treated(handler: Callable, request, response, storage, *arguments, **more) -> None:
    """A request, with the conditions that it makes and the generation that it comes to."""
    bucket, name = request.params.get('bucket_name'), named(request)
    now = generation(storage, bucket, name) if bucket and name else '0'
    wanted, unwanted = (request.query.get(f'ifGeneration{what}', [None])[0] for what in ('Match', 'NotMatch'))
    if 'upload_id' in request.query:
        (cancelled if request.method == 'DELETE' else part)(request, response, storage)
    elif wanted not in (None, now):
        response.status = HTTPStatus.PRECONDITION_FAILED
        response.json({'error': {'code': 412, 'message': 'conditionNotMet'}})
    elif unwanted == now != '0':
        response.status = HTTPStatus.NOT_MODIFIED
    else:
        handler(request, response, storage, *arguments, **more)
        if bucket and name:
            response['x-goog-generation'] = generation(storage, bucket, name)


def completed(handler: Callable) -> Callable:
    def alone(*arguments, **more) -> None:
        with ALONE:
            treated(handler, *arguments, **more)

    return alone


def exact(parsed: Callable, handler, query) -> dict | list | bytes | None:
    """Its own way through a multipart takes the last of some line ends for the part's."""
    kind = handler.headers.get('Content-Type') or ''
    if not kind.startswith('multipart/related'):
        return parsed(handler, query)
    raw = server._decode_raw_data(server._read_raw_data(handler), handler)
    boundary = re.search('boundary="?([^";]+)', kind)[1].encode()
    _, first, second = raw.split(b'--' + boundary, 2)
    end = b'\r\n' if second.startswith(b'\r\n') else b'\n'
    head, content = second.split(2 * end, 1)
    said, content = first.split(2 * end, 1)[1], content[: content.rindex(end + b'--' + boundary)]
    return {'meta': json.loads(said), 'content': content, 'content-type': head.decode().split(':')[1].strip()}


def serve(port: int, waiting: int) -> None:
    def more(regex: str) -> list:
        return [('DELETE', cancelled)] if regex.startswith('^/upload/') else []

    server._read_data = functools.partial(exact, server._read_data)
    server.HANDLERS = tuple(
        (regex, {method: completed(handler) for method, handler in [*handlers.items(), *more(regex)]})
        for regex, handlers in server.HANDLERS
    )
    # It would write all that it knows at each change: requests of a long session take ten times as long.
    storage.Storage._write_config_to_file = lambda _: None
    server.server.HTTPServer.request_queue_size = waiting
    server.Server('127.0.0.1', port, in_memory=True).run()
