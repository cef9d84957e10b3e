"""Reader of .wandb files, which wandb itself no longer reads.

A file is a log of LevelDB after seven bytes.
"""

import json
import struct

BLOCK_SIZE, HEADER_SIZE, FULL_FRAGMENT, LAST_FRAGMENT = 1 << 15, 7, 1, 4


def read_records(data: bytes):
    """Yield the bytes of each record, joined from its fragments."""
    position, content = HEADER_SIZE, b''
    while position + HEADER_SIZE <= len(data):
        if BLOCK_SIZE - position % BLOCK_SIZE < HEADER_SIZE:
            position += BLOCK_SIZE - position % BLOCK_SIZE
            continue
        _, length, kind = struct.unpack_from('<IHB', data, position)
        content += data[position + HEADER_SIZE : position + HEADER_SIZE + length]
        position += HEADER_SIZE + length
        if kind in (FULL_FRAGMENT, LAST_FRAGMENT):
            yield content
            content = b''


def read_history(path) -> list[dict]:
    """Return the records that a run has logged."""
    from wandb.proto.wandb_internal_pb2 import Record

    history_records = []
    for data in read_records(path.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        if record.WhichOneof('record_type') == 'history':
            items = {item.key or '/'.join(item.nested_key): item.value_json for item in record.history.item}
            history_records.append({key: json.loads(value) for key, value in items.items() if key[:1] != '_'})
    return history_records
