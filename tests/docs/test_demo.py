"""What `make run` shows, and that the figures of the demo in the docs are those that were measured."""

import json
import re
import shlex
from pathlib import Path

import pytest

from commands import call
from polytier.runs.defaults import settings

ROOT = Path(__file__).parents[2]
METHODS = {"local", "fedavg", "fedavg-ft", "hier-fedavg", "ditto", "permfl"}
KINDS = ("personal", "team", "global")


def demo_command() -> list[str]:
    """The words after `polytier` in the recipe of `make run`."""
    text = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    methods = re.search(r"^METHODS := (\S+)$", text, re.MULTILINE)
    recipe = re.search(r"^run:.*\n\t\$\(BIN\)/polytier (.*)$", text, re.MULTILINE)
    assert methods is not None
    assert recipe is not None
    return shlex.split(recipe[1].replace("$(METHODS)", methods[1]))


def results() -> dict:
    return json.loads((ROOT / "docs/results/demo.json").read_text())


def test_the_demo_ends_with_a_table_a_sentence_and_a_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = call(*demo_command(), "--rounds", 10, "--seeds", 1, "--batching", "eager")
    found = json.loads(Path("runs/demo/compare.json").read_text())
    assert {row["method"] for row in found["methods"]} == METHODS
    assert {record["state"] for record in found["records"]} == {"done"}
    assert len({round(row["gradients"]["mean"]) for row in found["methods"]}) == 1  # as much work for each
    judged = {row["method"]: row["judged_by"] for row in found["methods"]}
    assert judged["hier-fedavg"] == "team"
    assert judged["permfl"] == "personal"
    *table, sentence, _, folder, page = result.stdout.rstrip().splitlines()
    assert all(any(line.startswith(method) for line in table) for method in METHODS)
    best = found["methods"][0]
    assert re.match(r"(The|Training alone) .*, seen with one seed only", sentence)
    assert f"of {best['method']} " in sentence or f"({best['method']})" in sentence
    assert f"{100 * best[best['judged_by']]['mean']:.2f} %" in sentence
    assert (folder, page) == ("folder: runs/demo", "page: runs/demo/report.html")
    assert "digits-sites" in Path("runs/demo/report.html").read_text()


def test_the_demo_runs_the_fields_that_its_searches_found():
    command = results()["command"]
    own = demo_command()
    assert own[:2] == shlex.split(command)[1:3]
    for name in ("--data", "--split", "--steps", "--rounds", "--seeds", "--eval-every"):
        assert own[own.index(name) + 1] == re.search(rf"{name} (\S+)", command)[1]  # type: ignore[index]
    for method, found in results()["methods"].items():
        table = {**settings(method, "digits-sites", "mclr"), **settings(method, "digits-sites", "mclr", 20)}
        tuned = dict(found["tuning"]["fields"])
        if method == "permfl":  # these follow from its pulls
            tuned = {name: value for name, value in tuned.items() if name not in ("team_lr", "server_lr")}
        if method == "ditto":  # compare --steps divides its gradients so
            tuned = {name: value for name, value in tuned.items() if not name.endswith("_steps")}
        assert {name: value for name, (value, _) in table.items()} == tuned, method
        assert found["tuning"]["trials"] + len(found["tuning"]["validation_by_team_rounds"]) - 1 == 16  # all the same


@pytest.mark.parametrize("page", ["README.md", "docs/findings.md"])
def test_the_table_of_the_demo_is_the_one_that_was_measured(page):
    text = (ROOT / page).read_text()
    rows = dict(re.findall(r"^\| `([\w-]+)` \|(.* ± .*)\|$", text, re.MULTILINE))
    assert set(rows) >= METHODS
    for method, found in results()["methods"].items():
        cells = [cell.strip(" *") for cell in rows[method].split("|")][:3]
        assert cells == [
            f"{100 * found[kind]['mean']:.1f} ± {100 * found[kind]['half']:.1f}" if kind in found else "-"
            for kind in KINDS
        ]
