"""The tables of the pages about the papers are those that the results in docs/results give."""

from __future__ import annotations

import json
import re
import runpy
from types import SimpleNamespace

import pytest

from doc_pages import ROOT
from polytier import papers

pages = SimpleNamespace(**runpy.run_path(str(ROOT / "docs/make_reproduction.py")))


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: page.name)
def test_pages_show_the_stored_results(page):
    text = page.read_text(encoding="utf-8")
    assert pages.refreshed(text) == text, "run `python docs/make_reproduction.py`"


def test_a_figure_that_is_changed_by_hand_is_found():
    text = (ROOT / "docs/reproduction.md").read_text(encoding="utf-8")
    found = next(match for match in pages.BLOCK.finditer(text) if re.search(r"\d\d\.\d\d", match[0]))
    place = found.start() + re.search(r"\d\d\.\d(\d)", found[0]).start(1)  # type: ignore[union-attr]
    changed = text[:place] + str((int(text[place]) + 1) % 10) + text[place + 1 :]
    assert pages.refreshed(changed) == text


def test_every_stored_run_belongs_to_a_plan_and_says_where_it_comes_from():
    for paper in papers.PAPERS:
        items = papers.items_of(paper, "full")
        files = sorted((pages.RESULTS / paper).glob("*.json"))
        kept = pages.stored_runs(pages.RESULTS / paper, items, "full")
        assert sum(map(len, kept.values())) == len(files), paper
        for path in files:
            content = json.loads(path.read_text(encoding="utf-8"))
            assert content["command"].startswith(f"polytier reproduce {paper}/"), path
            assert content["commit"], path
            assert content["machine"]["processor"], path
            assert {"polytier", "torch"} <= set(content["versions"]), path
