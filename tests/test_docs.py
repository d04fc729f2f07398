"""What the README and CONTRIBUTING show is run as it stands there."""

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

import polytier

ROOT = Path(__file__).parent.parent


def python_block(name: str) -> str:
    found = re.search(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)
    assert found is not None
    return textwrap.dedent(found.group(1))


def test_readme_code_runs(capsys):
    exec(python_block("README.md"), {})
    assert "tensor(" in capsys.readouterr().out


def test_method_of_contributing_keeps_the_contract():
    names = {"dataclass": dataclass, **{name: getattr(polytier, name) for name in ("Algorithm", "Step", "parameter")}}
    # a class needs a module to be pickled by, so its home is this one
    names["__name__"] = __name__
    exec(python_block("CONTRIBUTING.md"), names)
    globals()["MyMethod"] = names["MyMethod"]
    polytier.check_algorithm(names["MyMethod"]())


def test_public_names_exist():
    for name in polytier.__all__:
        assert getattr(polytier, name) is not None
