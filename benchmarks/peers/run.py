"""Other packages on the common work of `polytier bench`: those that are installed here.

    python benchmarks/peers/run.py [fedjax] [pfl] [flower]

Prints device steps a second. Compare with `polytier bench common` on the same quiet machine. Each package is best
installed in an environment of its own. Tried with Python 3.11 and

    fedjax==0.0.17 jax[cpu]==0.4.25 dm-haiku==0.0.12 optax==0.2.2 "numpy<2"     (newer jax has no jax.tree_map)
    pfl==0.6.0 torch
    flwr[simulation]==1.41.0 torch
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).parent.parent)  # not this folder: its files have the names of the packages


def main() -> None:
    for name in sys.argv[1:] or ("fedjax", "pfl", "flower"):
        try:
            print(f"{name:8}{importlib.import_module(f'peers.{name}').speed():9,.0f} device steps a second")
        except ImportError as error:
            print(f"{name:8}not installed ({error})")


if __name__ == "__main__":
    main()
