"""Ports and signal handlers of processes that tests start."""

import contextlib
import random
import re
import socket
import time
from pathlib import Path


def find_free_port():
    """Return a port that is free and that the system does not give to outgoing connections."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)  # Linux gives out those from 32,768 on
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(('127.0.0.1', port))
            return port


def wait_for_sigterm_handler(process, seconds=20):
    """Wait until a process handles SIGTERM or has ended. Python takes some tenths of a second to start."""
    status, deadline = Path(f'/proc/{process.pid}/status'), time.monotonic() + seconds
    while process.poll() is None and not int(re.search(r'SigCgt:\s(\w+)', status.read_text())[1], 16) >> 14 & 1:
        assert time.monotonic() < deadline
        time.sleep(0.01)
