"""`python -m polytier` is the command `polytier`."""

import os
import sys

# `python -m` puts the current folder first on the search path, before the installed packages. It is removed, as the
# command `polytier` does not have it either, unless this package itself was found there.
if not sys.flags.safe_path and os.path.realpath(sys.path[0]) == os.getcwd() != os.path.realpath(f"{__file__}/../.."):
    del sys.path[0]

from polytier.cli import main

main()
