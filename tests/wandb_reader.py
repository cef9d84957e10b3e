"""Reader of .wandb files, which wandb itself no longer reads.

A file is a log of LevelDB after seven bytes.
"""

import json
import struct

BLOCK, HEADER, FULL, LAST = 1 << 15, 7, 1, 4


def read_records(data: bytes):
    """Yield the bytes of each record, joined from its fragments."""
    position, content = HEADER, b''
    while position + HEADER <= len(data):
        if BLOCK - position % BLOCK < HEADER:
            position += BLOCK - position % BLOCK
            continue
        _, length, kind = struct.unpack_from('<IHB', data, position)
        content += data[position + HEADER : position + HEADER + length]
        position += HEADER + length
        if kind in (FULL, LAST):
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
