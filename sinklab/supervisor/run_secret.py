"""The secret of a run, with which its processes authenticate their connections.

The secret is never sent. Each side of a new connection sends a nonce, and proves by an HMAC over both nonces that it
knows the secret. If there is no secret, the proofs are still checked, but they protect nothing.
"""

import contextlib
import dataclasses
import hmac
import os
import re
import secrets
import socket
from pathlib import Path

from sinklab.schema import UserError
from sinklab.storage.cache_dir import get_cache_dir
from sinklab.supervisor.cluster import ProcessInfo

SECRET_VARIABLE = 'SINKLAB_RUN_SECRET'
MIN_SECRET_CHARS = 16  # whoever records a greeting can try all shorter secrets
MAX_SECRET_FILE_BYTES = 4096


@dataclasses.dataclass(frozen=True)
class RunSecret:
    """A secret, and its file if process 0 has created one."""

    text: str = ''
    file: Path | None = None

    def prove(self, role: str, *parts: object) -> str:
        """Return an HMAC that proves knowledge of the secret.

        Args:
            role: The side that makes the proof, so that nobody can send a proof back to its sender.
            *parts: The nonces of both sides, and the values that the proof authenticates.
        """
        content = '\n'.join([role, *map(str, parts)])
        return hmac.new(self.text.encode(), content.encode(), 'sha256').hexdigest()

    def remove_file(self) -> None:
        """Remove the file of the secret.

        Call this while the port is still held: afterwards the file may be that of another run.
        """
        if self.file:
            with contextlib.suppress(OSError):
                self.file.unlink()


def read_secret_variable() -> str:
    """Return the value of SINKLAB_RUN_SECRET; '' if the variable is not set.

    Raises:
        UserError: The value is empty, or too short to protect anything.
    """
    secret = os.environ.get(SECRET_VARIABLE)
    if secret is None:
        return ''
    secret = secret.strip()
    if not secret:  # the command that should have set it failed; the run must not go on unprotected
        raise UserError(
            f'{SECRET_VARIABLE} is set and empty, and needs at least {MIN_SECRET_CHARS} characters; '
            'make one for all processes by: openssl rand -hex 32, or unset it'
        )
    if len(secret) < MIN_SECRET_CHARS:
        raise UserError(
            f'{SECRET_VARIABLE} has {len(secret)} characters and needs at least {MIN_SECRET_CHARS}; '
            'make one by: openssl rand -hex 32'
        )
    return secret


def create_secret(process_info: ProcessInfo) -> RunSecret:
    """Return the secret of process 0: SINKLAB_RUN_SECRET, or a new one if all processes are local.

    A new secret is written to the user's cache, readable by this user alone. If it cannot be written, the secret is
    the one that the other processes find there: that of a run that was killed, or ''. The secret is also '' if
    processes are on several machines and the variable is not set.
    """
    if (secret := read_secret_variable()) or not process_info.is_local:
        return RunSecret(secret)
    text, file = secrets.token_hex(32), get_secret_path(process_info.port)
    temporary_path = file.with_name(f'{file.name}.{secrets.token_hex(4)}')
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(temporary_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(descriptor, 'w') as stream:
            stream.write(text)
        temporary_path.replace(file)
    except OSError:
        with contextlib.suppress(OSError):
            temporary_path.unlink()
        return RunSecret(read_secret_file(file), file)
    return RunSecret(text, file)


def find_secret(process_info: ProcessInfo) -> RunSecret:
    """Return the secret of another process than 0: SINKLAB_RUN_SECRET, or the one in process 0's file.

    Call this after process 0 has answered: by then it has written the file.
    """
    if (secret := read_secret_variable()) or not process_info.is_local:
        return RunSecret(secret)
    return RunSecret(read_secret_file(get_secret_path(process_info.port)))


def read_secret_file(file: Path) -> str:
    """Return the secret in a file of this user; '' if there is none, or if it is too short."""
    try:
        with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as stream:
            text = stream.read(MAX_SECRET_FILE_BYTES) if os.fstat(stream.fileno()).st_uid == os.geteuid() else ''
    except (OSError, ValueError):
        return ''
    return text if len(text) >= MIN_SECRET_CHARS else ''


def get_secret_path(port: int) -> Path:
    """Return the file of the secret of the run whose process 0 listens on a port of this machine."""
    host = re.sub(r'[^\w.-]', '_', socket.gethostname())
    return get_cache_dir() / 'run-secrets' / f'{host}-{port}'
