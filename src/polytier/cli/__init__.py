"""The command line. torch is imported only by the commands that need it."""

import faulthandler
import sys

from polytier._errors import INTERRUPTED


def main() -> None:
    """The entry point of the command `polytier`."""
    try:
        if sys.stderr is not None:
            faulthandler.enable()  # a crash, such as a read of a mapped file that was cut, names where it happened
        from polytier.cli.main import app

        app(prog_name="polytier")  # also for `python -m polytier`: help texts and completion use it
    except KeyboardInterrupt:  # while modules are imported; commands handle it themselves
        print("polytier: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
