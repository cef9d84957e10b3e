"""The model directory of hf:PATH_OR_ID, its digest, and refusal of remote code."""

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path

from sinklab.hf import files
from sinklab.run_ref import HF_PREFIX
from sinklab.schema import UserError

CODE_PATTERN = '*.py'  # Python code of a model; fetched only if remote_code is given


def find_model_dir(path_or_id: str, remote_code: bool = False) -> Path:
    """Return the directory of a local model, or fetch the files of a model of the Hugging Face hub.

    Raises:
        UserError: The directory holds a run of sinklab, no config.json, or weights that are not safetensors.
    """
    model_dir = files.fetch_model_dir(
        f'{HF_PREFIX}{Path(path_or_id).expanduser()}', (CODE_PATTERN,) if remote_code else ()
    )
    if (model_dir / 'row.json').exists():
        raise UserError(f'{model_dir} holds a run of sinklab; leave hf: out')
    if not (model_dir / files.CONFIG_FILE).exists():
        raise UserError(
            f'{model_dir} holds no open model (no {files.CONFIG_FILE}); give a folder of transformers, or a run'
        )
    files.list_weight_files(model_dir)
    return model_dir


@contextlib.contextmanager
def explain_remote_code(name: str) -> Iterator[None]:
    """Raise a UserError that names --remote-code where transformers refuses to run Python code of a model.

    Callers always give `trust_remote_code`: without it transformers asks on a terminal whether to run the code.
    """
    try:
        yield
    except Exception as error:  # transformers raises ValueError, and here that may have become a UserError
        if not any('trust_remote_code' in str(exception) for exception in (error, error.__cause__)):
            raise
        raise UserError(
            f'{name} comes with Python code of its own, which is not run; read that code, and give --remote-code to '
            'run it as this user'
        ) from error


def digest_model_dir(model_dir: Path) -> str:
    """Return a SHA-256 digest of the config, weights and Python code of a model."""
    hasher = hashlib.sha256()
    for file in (
        model_dir / files.CONFIG_FILE,
        *files.list_weight_files(model_dir),
        *sorted(model_dir.glob(CODE_PATTERN)),
    ):
        with file.open('rb') as stream:
            hasher.update(hashlib.file_digest(stream, 'sha256').digest())
    return hasher.hexdigest()
