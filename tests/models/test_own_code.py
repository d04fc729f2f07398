"""Where a module would be imported from: installed packages, or the current folder."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from polytier.models.own_code import exists, in_current_folder, load

MARK = "from pathlib import Path\nPath(__file__).with_suffix('.ran').touch()\nthing = 1\n"


@pytest.fixture
def here(tmp_path, monkeypatch) -> Iterator[Path]:
    """The current folder; beside it `installed`, which Python searches."""
    here, installed = tmp_path / "here", tmp_path / "installed"
    here.mkdir()
    installed.mkdir()
    monkeypatch.chdir(here)
    known = set(sys.modules)
    monkeypatch.setattr(sys, "path", [*(entry for entry in sys.path if entry), str(installed)])
    yield here
    for name in set(sys.modules) - known:
        del sys.modules[name]


def module(folder: Path, name: str) -> Path:
    path = folder.joinpath(*name.split(".")).with_suffix(".py")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(MARK)
    importlib.invalidate_caches()
    return path


def ran(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*.ran")]


def test_a_module_of_the_current_folder_is_found_and_not_imported(here):
    path = module(here, "oc_plain")
    assert in_current_folder("oc_plain") == path
    assert ran(here) == []
    assert str(here) not in sys.path
    assert load("oc_plain:thing") == 1
    assert ran(here) == ["oc_plain.ran"]


def test_no_parent_in_the_current_folder_is_imported(here):
    module(here, "oc_package.__init__")
    module(here, "oc_package.inner")
    assert in_current_folder("oc_package.inner") is not None
    assert ran(here) == []


def test_installed_modules_are_taken_without_the_current_folder(here):
    module(here.parent / "installed", "oc_installed.inner")
    module(here, "oc_optional")  # what an installed module may try to import
    assert in_current_folder("oc_installed.inner") is None
    assert in_current_folder("json.decoder") is None
    assert in_current_folder("sys") is None
    assert load("oc_installed.inner:thing") == 1
    assert str(here) not in sys.path


def test_the_rest_of_a_package_that_is_installed_may_lie_in_the_current_folder(here):
    module(here.parent / "installed", "oc_shared.one")  # a namespace package: a folder without __init__.py
    module(here, "oc_shared.two")
    assert in_current_folder("oc_shared.one") is None
    assert in_current_folder("oc_shared.two") is not None
    assert ran(here) == []
    assert load("oc_shared.two:thing") == 1


@pytest.mark.parametrize("entry", ["", ".", "sub", "absolute"])
def test_a_search_path_into_the_current_folder_makes_nothing_installed(here, monkeypatch, entry):
    folder = here / "sub" if entry == "sub" else here
    path = module(folder, "oc_on_path")
    monkeypatch.syspath_prepend(str(here) if entry == "absolute" else entry)
    assert in_current_folder("oc_on_path") == path
    assert ran(here) == []


def test_names_and_links_do_not_make_it_installed(here):
    module(here, "site-packages.oc_disguised")
    assert in_current_folder("site-packages.oc_disguised") is not None
    target = module(here.parent / "elsewhere", "oc_linked")
    (here / "oc_linked.py").symlink_to(target)
    assert in_current_folder("oc_linked") is not None
    assert ran(here.parent) == []


def test_packages_of_an_environment_below_the_current_folder_are_installed(here, monkeypatch):
    packages = here / ".venv" / "lib" / "site-packages"
    module(packages, "oc_environment")
    monkeypatch.setattr("site.getsitepackages", lambda: [str(packages)])
    monkeypatch.syspath_prepend(str(packages))
    assert in_current_folder("oc_environment") is None


def test_what_is_imported_already_is_the_programs_choice(here, monkeypatch):
    module(here, "oc_used")
    monkeypatch.syspath_prepend(str(here))
    importlib.import_module("oc_used")
    assert in_current_folder("oc_used") is None


@pytest.mark.parametrize(
    "name", ["", ".", "oc_nowhere", "oc_nowhere.inner", ".oc_relative", "json.oc_nowhere", "sys.x"]
)
def test_what_is_nowhere_adds_nothing_to_the_search_path(here, name):
    assert in_current_folder(name) is None
    with pytest.raises(ValueError):
        load(f"{name}:thing")
    assert str(here) not in sys.path


def test_exists(here):
    module(here, "oc_there")
    assert exists("oc_there")
    assert exists("json")
    assert exists("torch.nn")
    assert not exists("oc_nowhere")
    assert not exists("")
