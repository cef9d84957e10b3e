"""Arrays one after another with the JSON that says where they lie: what a page carries, compressed, as text.

Unpacked by assets/unpack.js: the length of the JSON in four bytes, the JSON, padding to four bytes, the arrays.
"""

import base64
import gzip
import json
from typing import Any

import numpy as np

ALIGNMENT_BYTES = 4
MAX_LEVEL = {'u1': 255, 'u2': 65535}


def pad_to_alignment(data: bytes) -> bytes:
    return data + b' ' * (-len(data) % ALIGNMENT_BYTES)


class BinaryPayload:
    def __init__(self) -> None:
        self.offsets: dict[bytes, int] = {}  # what was added, and where it begins; the same is kept once
        self.num_bytes = 0

    def add_array(self, values: Any, dtype: str = 'f4') -> list:
        """[kind, first byte, length] of an array, for the JSON."""
        array = np.ascontiguousarray(values, np.dtype(dtype).newbyteorder('<'))
        data = pad_to_alignment(array.tobytes())
        if data not in self.offsets:
            self.offsets[data] = self.num_bytes
            self.num_bytes += len(data)
        return [dtype, self.offsets[data], array.size]

    def add_quantized(self, values: np.ndarray, low: float, top: float, dtype: str) -> list:
        """By as many levels from low to top as the kind has; what is not finite counts as low."""
        share = (np.nan_to_num(values, nan=low, posinf=top, neginf=low) - low) / max(top - low, 1e-30)
        return self.add_array(np.rint(np.clip(share, 0, 1) * MAX_LEVEL[dtype]), dtype)

    def encode(self, header: Any) -> str:
        header_bytes = pad_to_alignment(json.dumps(header, allow_nan=False, separators=(',', ':')).encode())
        content_bytes = len(header_bytes).to_bytes(ALIGNMENT_BYTES, 'little') + header_bytes + b''.join(self.offsets)
        return base64.b64encode(gzip.compress(content_bytes, 6, mtime=0)).decode()
