"""hf:PATH_OR_ID, an open model: its folder, here or fetched, and what is refused of one before it is loaded."""

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path

from sinklab.llama import PREFIX, files
from sinklab.record import Refusal

CODE = '*.py'  # that comes with a model, fetched where it may run


def folder_of(given: str, remote_code: bool = False) -> Path:
    """A folder as it is, else the files of a model of the Hugging Face hub, with all their weights as safetensors."""
    folder = files.opened(f'{PREFIX}{Path(given).expanduser()}', (CODE,) if remote_code else ())
    if (folder / 'row.json').exists():
        raise Refusal(f'{folder} holds a run of sinklab; leave hf: out')
    if not (folder / files.CONFIG).exists():
        raise Refusal(f'{folder} holds no open model (no {files.CONFIG}); give a folder of transformers, or a run')
    files.parts(folder)
    return folder


@contextlib.contextmanager
def explain_remote_code(name: str) -> Iterator[None]:
    """Name --remote-code where transformers refuses to run Python code that comes with a model or a tokenizer.

    transformers asks on a terminal whether to run it unless `trust_remote_code` is given, so that it is always given.
    """
    try:
        yield
    except Exception as error:  # transformers raises ValueError, and here that may have become a Refusal
        if not any('trust_remote_code' in str(one) for one in (error, error.__cause__)):
            raise
        raise Refusal(
            f'{name} comes with Python code of its own, which is not run; read that code, and give --remote-code to '
            'run it as this user'
        ) from error


def digest(folder: Path) -> str:
    """Of config, weights and code."""
    found = hashlib.sha256()
    for file in (folder / files.CONFIG, *files.parts(folder), *sorted(folder.glob(CODE))):
        with file.open('rb') as opened:
            found.update(hashlib.file_digest(opened, 'sha256').digest())
    return found.hexdigest()
