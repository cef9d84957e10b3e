"""Entry point of the command `sinklab`."""

import contextlib
import sys

from sinklab.cli.main import main


def run() -> None:
    """Run a command, and exit with its exit code."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors='backslashreplace')  # for paths that are not UTF-8
    exit_code = 0
    with contextlib.suppress(SystemExit):  # of --help and --version
        exit_code = main()
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has gone, as after `| head`
        from sinklab.cli.terminal import discard_stdout

        discard_stdout()
    sys.exit(exit_code)


if __name__ == '__main__':
    run()
