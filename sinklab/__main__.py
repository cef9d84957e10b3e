"""Entry point of the command `sinklab`: installs signal handlers and safe streams before heavy imports."""

import _signal  # a built-in module: `signal` would import other modules first

if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
    _signal.signal(
        _signal.SIGINT, _signal.SIG_DFL
    )  # Ctrl-C during imports prints no traceback; `startup_signals.install_signal_handlers` replaces this

import os
import sys

from sinklab import standard_streams, startup_signals


def run() -> None:
    """Run a command, and exit with its exit code."""
    standard_streams.install_safe_streams()
    startup_signals.install_signal_handlers(
        next((argument for argument in sys.argv[1:] if not argument.startswith('-')), '')
    )
    from sinklab.cli.main import find_command, import_command, main

    if command := find_command(sys.argv[1:]):
        import_command(command)  # while Ctrl-C ends the process at once
    try:
        with startup_signals.enable_keyboard_interrupts():
            exit_code = main()
    except KeyboardInterrupt:  # outside of a command
        os._exit(startup_signals.SIGINT_EXIT_CODE)
    except standard_streams.OutputClosedError:  # the reader closed the pipe while argparse printed help
        exit_code = 0
    except SystemExit as exit_error:  # raised by argparse
        exit_code = exit_error.code
    sys.exit(standard_streams.flush_standard_streams(exit_code))


if __name__ == '__main__':
    run()
