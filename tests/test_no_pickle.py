"""Nothing that comes from a file or from another machine is unpickled: a pickle can run any code as it is read.

`ALLOWED` lists the files of the package that use pickles, and why these are safe.
"""

from __future__ import annotations

import ast
import pickle
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import polytier
from polytier import Federation, Participation, build_federation
from polytier.tree import collaboration

SOURCE = Path(polytier.__file__).parent
MODULES = {"pickle", "_pickle", "pickletools", "cloudpickle", "dill", "marshal", "shelve", "joblib", "multiprocessing"}
CALLS = {"torch.load", "torch.hub.load", "torch.jit.load", "torch.package.PackageImporter", "pandas.read_pickle"}
ARRAYS = {"numpy.load", "numpy.save", "numpy.lib.format.read_array", "numpy.lib.npyio.NpzFile"}

ALLOWED = {
    "data/sources/cifar.py": "the restricted reader of CIFAR's own files, which makes arrays and nothing else",
    "engines/workers.py": "pipes among a run's own processes",
    "engines/stacked.py": "tries whether an object can be sent through these pipes; reads nothing",
    "engines/process_start.py": "starts a run's own processes",
    "studies/run_queue.py": "pipes among a study's own processes",
    "engines/ray/actor.py": "messages of Ray, which trusts its cluster",
    "runs/contract.py": "copies in memory",
    "stack/held.py": "a weak reference to the memory of a tensor; nothing is pickled",
}


def uses(text: str) -> Iterator[str]:
    """What a source file uses that can unpickle."""
    tree, names = ast.parse(text), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {each.asname or each.name.partition(".")[0]: each.name for each in node.names}
            names |= {
                each.name.partition(".")[0]: each.name.partition(".")[0] for each in node.names if not each.asname
            }
            yield from (each.name for each in node.names if MODULES & set(each.name.split(".")))
        elif isinstance(node, ast.ImportFrom):
            full = {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
            names |= full
            yield from (name for name in full.values() if MODULES & set(name.split(".")) or name in CALLS)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in MODULES:
            yield f"the text {node.value!r}"  # a module imported by name
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            first, dot, rest = ast.unparse(node.func).partition(".")
            name = names.get(first, first) + dot + rest
            refuses = any(
                each.arg == "allow_pickle" and isinstance(each.value, ast.Constant) and each.value.value is False
                for each in node.keywords
            )
            if name in CALLS or name.endswith(".read_pickle") or (name in ARRAYS and not refuses):
                yield name


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "import pickle as p",
        "from pickle import loads",
        "from ray import cloudpickle",
        "import ray.cloudpickle",
        "def f():\n    import marshal",
        "from multiprocessing.connection import Connection",
        "importlib.import_module('shelve')",
        "import torch\ntorch.load('a')",
        "from torch import load as read\nread('a', weights_only=True)",
        "import numpy as np\nnp.load('a')",
        "import numpy as np\nnp.load('a', allow_pickle=True)",
        "import numpy as np\nnp.load('a', allow_pickle=flag)",
        "from numpy import load\nload('a')",
        "import pandas as pd\npd.read_pickle('a')",
    ],
)
def test_uses_are_found(text):
    assert list(uses(text))


def test_other_readers_are_not():
    assert not list(uses("import json, numpy as np\njson.load(f)\nnp.load('a', allow_pickle=False)"))


def test_the_package_uses_pickles_only_where_it_is_listed():
    found = {path.relative_to(SOURCE).as_posix(): list(uses(path.read_text())) for path in SOURCE.rglob("*.py")}
    assert {name: what for name, what in found.items() if what and name not in ALLOWED} == {}
    assert [name for name in ALLOWED if not found.get(name)] == [], "no longer needed in the list"


# -- what a file with a pickle in it does: nothing -----------------------------------------------------


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.fixture
def evil(tmp_path) -> np.ndarray:
    return np.array([Payload(tmp_path / "unpickled")] * 4, dtype=object)


def test_the_payload_works(tmp_path, evil):
    pickle.loads(pickle.dumps(evil))
    assert (tmp_path / "unpickled").exists()


def test_files_with_pickles_are_refused(tmp_path, evil):
    labels = np.arange(4)
    np.savez(tmp_path / "data.npz", x=evil, y=labels, device=labels)
    np.savez(tmp_path / "ids.npz", x=np.zeros((4, 2)), y=labels % 2, device=evil)
    np.save(tmp_path / "table.npy", evil, allow_pickle=True)
    (tmp_path / "table.npz").write_bytes(pickle.dumps(evil))
    np.savez(tmp_path / collaboration.FILE, rounds=evil, weights=evil, ids=evil)
    x, device = np.zeros((8, 2), dtype=np.float32), np.repeat(np.arange(4), 2)
    Federation.from_arrays(x, device % 2, device).save(tmp_path / "packed")
    for path in (tmp_path / "packed").glob("*.npy"):
        np.save(path, evil, allow_pickle=True)
    attempts = [
        lambda: build_federation(tmp_path / "data.npz"),
        lambda: build_federation(tmp_path / "ids.npz"),
        lambda: build_federation(tmp_path / "table.npz"),
        lambda: Participation.parse(f"table:{tmp_path / 'table.npy'}"),
        lambda: collaboration.load(tmp_path / collaboration.FILE),
        lambda: Federation.open(tmp_path / "packed"),
    ]
    for attempt in attempts:
        with pytest.raises(ValueError):
            attempt()
    assert not (tmp_path / "unpickled").exists()
