"""`python -m polytier` is the command `polytier`."""

from polytier.cli import main

main()
