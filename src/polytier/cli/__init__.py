"""The command line. torch is imported only by the commands that need it."""

from polytier.cli.main import app, main

__all__ = ["app", "main"]
