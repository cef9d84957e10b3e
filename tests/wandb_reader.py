"""What a .wandb file holds, which wandb itself no longer reads: a log of LevelDB after seven bytes."""

import json
import struct

BLOCK, HEADER, WHOLE, LAST = 1 << 15, 7, 1, 4


def records(data: bytes):
    """The bytes of each record, joined from its fragments."""
    at, found = HEADER, b''
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from('<IHB', data, at)
        found += data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (WHOLE, LAST):
            yield found
            found = b''


def history(path) -> list[dict]:
    """The lines that a run has logged."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    for data in records(path.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        if record.WhichOneof('record_type') == 'history':
            items = {item.key or '/'.join(item.nested_key): item.value_json for item in record.history.item}
            found.append({key: json.loads(value) for key, value in items.items() if key[:1] != '_'})
    return found
