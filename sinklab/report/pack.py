"""Arrays one after another with the JSON that says where they lie: what a page carries, compressed, as text.

Unpacked by assets/unpack.js: the length of the JSON in four bytes, the JSON, padding to four bytes, the arrays.
"""

import base64
import gzip
import json
from typing import Any

import numpy as np

ALIGNED = 4
LEVELS = {'u1': 255, 'u2': 65535}


def padded(data: bytes) -> bytes:
    return data + b' ' * (-len(data) % ALIGNED)


class Pack:
    def __init__(self) -> None:
        self.parts: dict[bytes, int] = {}  # what was added, and where it begins; the same is kept once
        self.size = 0

    def add(self, values: Any, kind: str = 'f4') -> list:
        """[kind, first byte, length] of an array, for the JSON."""
        array = np.ascontiguousarray(values, np.dtype(kind).newbyteorder('<'))
        data = padded(array.tobytes())
        if data not in self.parts:
            self.parts[data] = self.size
            self.size += len(data)
        return [kind, self.parts[data], array.size]

    def levels(self, values: np.ndarray, low: float, top: float, kind: str) -> list:
        """By as many levels from low to top as the kind has; what is not finite counts as low."""
        share = (np.nan_to_num(values, nan=low, posinf=top, neginf=low) - low) / max(top - low, 1e-30)
        return self.add(np.rint(np.clip(share, 0, 1) * LEVELS[kind]), kind)

    def text(self, content: Any) -> str:
        head = padded(json.dumps(content, allow_nan=False, separators=(',', ':')).encode())
        whole = len(head).to_bytes(ALIGNED, 'little') + head + b''.join(self.parts)
        return base64.b64encode(gzip.compress(whole, 6, mtime=0)).decode()
