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
    except OSError as error:
        from sinklab.cli import terminal

        terminal.discard_stdout()
        if not isinstance(error, BrokenPipeError):  # that is no error: the reader has gone, as after `| head`
            print(f'sinklab: standard output could not be written ({error.strerror})', file=sys.stderr)
            exit_code = exit_code or 1
    sys.exit(exit_code)


if __name__ == '__main__':
    run()
