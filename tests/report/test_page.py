"""What a reader needs from the page: the devices that are badly off, one axis for one run, labels that can be read."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from commands import call
from polytier.files.lock import FolderLock
from polytier.report import blocks, device_charts, page_contents
from polytier.report.grouping import studies
from polytier.report.page import render
from polytier.report.server import make_server
from run_folders import ALL, make_all, make_run

EXAMPLES = Path(__file__).parents[2] / "examples"
WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 800}
# texts of charts that are outside their picture, and pairs of texts that overlap
UNREADABLE = """() => [...document.querySelectorAll("svg[role=img]")].flatMap((chart) => {
  const frame = chart.getBoundingClientRect(), bad = [];
  const texts = [...chart.querySelectorAll("text")].map((text) => [text.textContent, text.getBoundingClientRect()])
    .filter(([words, box]) => words && box.width);
  texts.forEach(([words, a], k) => {
    const out = a.left < frame.left - 1 || a.right > frame.right + 1 || a.bottom > frame.bottom + 3;
    if (out) bad.push(`${words} is cut`);
    for (const [other, b] of texts.slice(k + 1))
      if (a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 5 && b.top < a.bottom - 5)
        bad.push(`${words} is on ${other}`);
  });
  return bad;
})"""


# every card that is not folded holds a chart or a table
DRAWN = """() => [...document.querySelectorAll(".card")].every((card) => card.querySelector("svg, table"))"""


def every(parts: Any, kind: Any) -> list[Any]:
    found = [
        each for part in parts for each in (every(part.blocks, kind) if isinstance(part, blocks.Section) else [part])
    ]
    return [block for block in found if isinstance(block, kind)]


def write_page(folder: Path, path: Path, live: bool = False) -> str:
    title, subtitle, parts = page_contents.page_of([folder], live)
    path.write_text(render(title, parts, subtitle), encoding="utf-8")
    return path.as_uri()


# -- blocks -------------------------------------------------------------------------------------------


def test_all_devices_are_in_one_table_with_their_gain_over_local(tmp_path):
    (devices,) = every(page_contents.page_of([make_all(tmp_path)])[2], blocks.Devices)
    assert devices.ids == [f"d{k}" for k in range(6)]
    assert dict(devices.facts) == {
        "team": ["0", "1"] * 3,
        "samples": [10, 11, 12, 13, 14, 15],
        "test samples": [3] * 6,
    }
    methods = {name: (dict(kinds), judge) for name, kinds, judge in devices.methods}
    assert next(iter(methods)) == "permfl"  # the best at this seed is shown first
    assert methods["permfl"] == ({kind: [40, 50, 60, 70, 80, 90] for kind in ALL}, "personal")
    assert methods["fedavg"] == ({"global": [60] * 6}, "global")
    assert devices.local == [50] * 6
    assert "seed 0" in devices.note


def test_of_very_many_devices_the_worst_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(device_charts, "ROWS", 4)
    (devices,) = every(page_contents.page_of([make_run(tmp_path / "run", "permfl")])[2], blocks.Devices)
    assert devices.ids == ["d0", "d1", "d2", "d3"]
    assert "the 4 devices of 6 that are worst off with permfl" in devices.note
    assert devices.local == ()  # there is no run of Local
    (devices,) = every(page_contents.page_of([make_run(tmp_path / "alone", "local")])[2], blocks.Devices)
    assert devices.local == ()  # nothing to compare it with


def test_one_run_shows_all_kinds_of_models_on_one_axis(tmp_path):
    parts = page_contents.page_of([make_run(tmp_path / "run", "permfl")])[2]
    lines = {chart.title: [series.name for series in chart.series] for chart in every(parts, blocks.Lines)}
    assert lines["Test accuracy by round"] == lines["Test loss"] == lines["Training loss"] == list(ALL)
    assert not every(parts, blocks.Panels)
    (bars,) = every(parts, blocks.Histogram)
    assert [name for name, _, _ in bars.series] == list(ALL)
    heat = next(block for block in every(parts, blocks.Heat) if block.title == "Values of the devices")
    assert list(heat.rows) == list(ALL)


def test_the_shares_beside_the_strip_are_of_the_seed_that_is_drawn(tmp_path):
    make_all(tmp_path)
    path = tmp_path / "permfl-1" / "devices.csv"
    path.write_text(path.read_text().replace(",0.4,", ",0.9,"))  # at another seed one more device gains
    heat = next(b for b in every(page_contents.page_of([tmp_path])[2], blocks.Heat) if b.diverging)
    assert heat.ends[list(heat.rows).index("permfl")] == "67 % gain, 17 % lose"
    assert [value > 0 for value in heat.values[list(heat.rows).index("permfl")]].count(True) == 4


def test_the_page_begins_with_what_was_found(tmp_path):
    make_all(tmp_path, [0])
    parts = page_contents.page_of([tmp_path])[2]
    assert parts[0].leading
    assert "seen with one seed only" in parts[0].text
    assert "training alone (local)" in parts[0].text.lower() or "local (" in parts[0].text


def test_watch_puts_the_run_under_way_first_and_folds_the_others(tmp_path):
    for k in range(3):
        make_run(tmp_path / f"done-{k}", "permfl", partition=f"labels:{k + 3}")
    now = make_run(tmp_path / "now", "permfl", done=2, partition="labels:9")
    state = {"state": "running", "reason": "", "round": 2, "format": 1}
    (now / "state.json").write_text(json.dumps(state))
    with FolderLock(now):
        parts = page_contents.page_of([tmp_path], live=True)[2]
        assert [part.text for part in parts if isinstance(part, blocks.Heading)] == [
            "digits, mclr, 6 devices, labels:9",
            "Other runs",
        ]
        text = next(part.text for part in parts if isinstance(part, blocks.Text) and part.leading)
        assert text.startswith("Under way: permfl, seed 0, round 2 of 5. Test accuracy in round 2: personal 2")
        folded = [part for part in parts if isinstance(part, blocks.Section) and part.folded]
        assert [part.title.split(" · ")[0][-8:] for part in folded[1:]] == ["labels:5", "labels:4", "labels:3"]
        assert folded[1].title.endswith("1 method · 1 run")
    stopped = page_contents.page_of([tmp_path], live=True)[2]
    assert not any("Under way" in part.text for part in stopped if isinstance(part, blocks.Text))
    assert sum(isinstance(part, blocks.Heading) for part in page_contents.page_of([tmp_path])[2]) == 4  # a report


def test_a_run_of_another_data_set_does_not_make_a_method_single(tmp_path):
    make_all(tmp_path, [0])
    assert [study.single for study in studies([tmp_path])] == [False]
    assert [study.single for study in studies([tmp_path / "permfl-0"])] == [True]


# -- in a browser -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def many(tmp_path_factory) -> str:
    """A page of a comparison with 45 devices and with long names."""
    root = tmp_path_factory.mktemp("many")
    first = {"device_lr": 0.1, "team_lr": "3/(60+t)", "device_pull": 0.25}
    other = {"device_lr": 0.2, "team_lr": "30/(600+t)", "device_pull": 0.5}
    make_run(root / "a", "permfl", devices=45, set=first)
    make_run(root / "b", "permfl", devices=45, set=other)
    make_run(root / "c", "local", devices=45)
    return write_page(root, root / "page.html")


def cells(page: Any, k: int) -> list[str]:
    return page.locator(f"#devices-all-devices tbody tr > :nth-child({k})").all_inner_texts()


def test_devices_are_searched_sorted_and_turned_over(visit, many):
    page = visit(many)
    card = page.locator("#devices-all-devices")
    assert len(cells(page, 1)) == 20
    assert cells(page, 1)[0] == "d0"  # the worst first
    assert card.locator("output").inner_text() == "1 to 20 of 45"
    card.get_by_role("button", name="Next").click()
    card.get_by_role("button", name="Next").click()
    assert cells(page, 1)[-1] == "d44"
    assert card.get_by_role("button", name="Next").is_disabled()
    card.get_by_label("Search device or team").fill("d4")
    assert cells(page, 1) == ["d4", "d40", "d41", "d42", "d43", "d44"]  # what is equal comes first
    card.get_by_role("button", name="samples", exact=True).click()
    assert cells(page, 1) == ["d4", "d44", "d43", "d42", "d41", "d40"]
    card.get_by_label("Search device or team").fill("nobody")
    assert card.locator("output").inner_text() == "nothing found"
    card.get_by_label("Search device or team").fill("d0")
    assert cells(page, 6) == ["-10.00"]
    card.get_by_label("Method").select_option("local")
    assert cells(page, 1) == ["d0"]
    assert card.locator("thead th").nth(2).inner_text() == "personal, %"


@pytest.fixture(scope="module")
def addresses(tmp_path_factory, report, many) -> Iterator[dict[str, str]]:
    """One page of every kind: two comparisons, one run, CoBo, several models, and `watch` with a run under way."""
    root = tmp_path_factory.mktemp("kinds")
    make_run(root / "single" / "run", "permfl")
    make_run(root / "cobo" / "run", "cobo")
    several = ("--devices", 6, "--rounds", 2, "--quiet", "--out", root / "several" / "run")
    call("run", EXAMPLES / "several_models.toml", *several)
    found = {kind: write_page(root / kind, root / f"{kind}.html") for kind in ("single", "cobo", "several")}
    make_run(root / "runs" / "done", "fedavg", partition="labels:3")
    make_run(root / "runs" / "now", "permfl", done=2)
    with make_server(root / "runs", 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        watch = f"http://127.0.0.1:{server.server_address[1]}/"
        yield {"comparison": report.as_uri(), "many": many, **found, "watch": watch}
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("kind", ["comparison", "many", "single", "cobo", "several", "watch"])
@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
def test_labels_are_whole_and_axe_finds_nothing(visit, addresses, kind, size):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python").Axe()
    for scheme in ("light", "dark"):
        page = visit(addresses[kind], viewport=size, color_scheme=scheme)
        page.evaluate("() => document.querySelectorAll('details').forEach((part) => { part.open = true; })")
        page.wait_for_function(DRAWN)
        assert page.evaluate(UNREADABLE) == []
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")  # only tables scroll sideways
        assert page.locator(".finding").first.inner_text().count(".") >= 1  # what was found, or what is under way
        assert [fault["id"] for fault in axe.run(page).response["violations"]] == []


def test_folded_parts_are_short_and_drawn_when_they_are_opened(visit, tmp_path):
    for k in range(6):
        make_run(tmp_path / f"run-{k}", "permfl", partition=f"labels:{k + 3}")
    page = visit(write_page(tmp_path, tmp_path / "page.html", live=True), viewport=WIDE)
    assert page.evaluate("document.documentElement.scrollHeight") < 6000
    assert page.locator("nav a").all_inner_texts() == ["digits, mclr, 6 devices, labels:8", "Other runs"]
    part = page.locator("details", has_text="labels:3 ·").last
    assert part.locator("svg[role=img]").count() == 0  # drawn when it is opened
    part.locator("summary").first.click()
    part.locator("svg[role=img]").first.wait_for()


def test_a_link_opens_what_is_folded(visit, report):
    page = visit(report.as_uri())
    page.get_by_role("link", name="Configuration and seeds").click()
    assert page.get_by_text("What all runs share").is_visible()


def test_a_table_that_scrolls_has_a_shadow_at_its_edge(visit, report):
    page = visit(report.as_uri(), viewport=PHONE)
    box = page.locator("#summary .scroll")
    assert box.evaluate("(box) => box.scrollWidth > box.clientWidth")
    assert box.evaluate("(box) => getComputedStyle(box).backgroundAttachment") == "local, local, scroll, scroll"
