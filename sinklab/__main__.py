"""The command `sinklab`: signals and streams are made safe before anything heavy is imported."""

import _signal  # built in: the module `signal` imports others first

if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)  # until `startup.install`: no traceback of an import

import os
import sys

from sinklab import startup, streams


def run() -> None:
    """Run a verb, and exit with its code."""
    streams.make_safe()
    startup.install(next((argument for argument in sys.argv[1:] if not argument.startswith('-')), ''))
    from sinklab.cli.main import main

    try:
        with startup.keyboard_interrupts():
            code = main()
    except KeyboardInterrupt:  # outside of a verb
        os._exit(startup.INTERRUPTED)
    except streams.OutputClosed:  # while help is printed
        code = 0
    except SystemExit as end:  # of argparse
        code = end.code
    sys.exit(streams.finish(code))


if __name__ == '__main__':
    run()
