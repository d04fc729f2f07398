"""Engines: what runs the programs of the nodes and moves rows between them. `make_engine` makes one by name."""

from polytier.engines.build import ENGINES, make_engine

__all__ = ["ENGINES", "make_engine"]
