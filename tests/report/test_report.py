"""The page of runs, its figures and tables: from small run folders that are written here, and from real ones."""

import json
import re
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commands import QUICK, SMALL, call
from polytier.models.metrics import ACCURACY
from polytier.report import blocks, curves, device_charts, figures, heatmap, markdown_latex, page_contents
from polytier.report.grouping import find, studies
from polytier.report.intervals import interval
from polytier.report.page import render
from polytier.tree.collaboration import Collaboration
from run_folders import ALL, KINDS, ROUNDS, make_all, make_run


def every(parts: Any) -> list[Any]:
    return [
        each for part in parts for each in ([part, *every(part.blocks)] if isinstance(part, blocks.Section) else [part])
    ]


def of_kind(parts: Any, kind: Any) -> dict[str, Any]:
    return {block.title: block for block in every(parts) if isinstance(block, kind)}


def rows_by_name(table: blocks.Table) -> dict[str, dict[str, blocks.Cell]]:
    return {row[0].value: dict(zip(table.columns, row, strict=True)) for row in table.rows}  # type: ignore[union-attr]


# -- from folders to blocks ---------------------------------------------------------------------------


def test_methods_with_other_rounds_and_the_same_work_share_an_axis_of_gradients(tmp_path):
    make_run(tmp_path / "permfl-0", "permfl", done=2, rounds=2)
    make_run(tmp_path / "local-0", "local")
    chart = of_kind(page_contents.page_of([tmp_path])[2], blocks.Lines)["Test accuracy by gradients"]
    assert chart.x == "gradients per device"
    # 60 steps of 6 devices, in two rounds and in five
    assert {series.name: series.x for series in chart.series} == {"permfl": [5, 10], "local": [2, 4, 6, 8, 10]}
    assert "of the personal model" not in chart.note  # both are judged by it
    make_run(tmp_path / "fedavg-0", "fedavg", done=2)  # has not ended: its gradients are not known
    assert of_kind(page_contents.page_of([tmp_path])[2], blocks.Lines)["Test accuracy by round"].x == "round"


def test_blocks_of_runs(tmp_path):
    title, subtitle, parts = page_contents.page_of([make_all(tmp_path)])
    assert title == "digits, mclr, 6 devices, labels:2"
    assert subtitle == "4 methods · 8 runs"
    summary = rows_by_name(of_kind(parts, blocks.Table)["Summary"])
    assert set(summary) == set(KINDS)
    assert summary["permfl"]["better than Local"].value == pytest.approx(100 * 4 / 6)
    assert summary["fedavg"]["personal"].text == "-"
    assert summary["permfl"]["traffic"].value == 4 * 100 * ROUNDS
    assert summary["local"]["better than Local"].text == "-"
    charts = of_kind(parts, blocks.Lines)
    found = {series.name: series for series in charts["Test accuracy by round"].series}
    values = [
        100
        * json.loads((tmp_path / f"permfl-{seed}" / "metrics.jsonl").read_text().splitlines()[2])["personal"]["test"][
            "accuracy"
        ]
        for seed in (0, 1)
    ]
    wanted = interval(values)
    assert wanted is not None
    series = found["permfl"]
    assert series.y[2] == pytest.approx(wanted["mean"])
    assert (series.low[2], series.high[2]) == pytest.approx((wanted["low"], wanted["high"]))
    costs = {series.name: series for series in charts["Test accuracy against bytes"].series}
    assert costs["permfl"].x == [400.0 * r for r in range(1, ROUNDS + 1)]
    assert costs["local"].dashed  # sends nothing: a level line
    panels = of_kind(parts, blocks.Panels)["Models side by side"]
    assert [chart.title for chart in panels.charts] == list(ALL)
    strip = of_kind(parts, blocks.Heat)["Who gains and who loses against Local"]
    assert strip.ends[strip.rows.index("permfl")] == "67 % gain, 17 % lose"
    assert strip.values[strip.rows.index("permfl")] == pytest.approx([-10, 0, 10, 20, 30, 40])
    labels = of_kind(parts, blocks.Heat)["Labels by team"]
    assert labels.columns == ["team 0", "team 1"]
    assert labels.values[0][0] == pytest.approx(100 * 30 / 36)  # devices 0, 2, 4 hold 10, 12, 14; two each have label 1
    tree = of_kind(parts, blocks.Tree)["Traffic by link"]
    assert {name: links for name, _, links in tree.methods}["fedavg"] == [("server-device", 500.0, 500.0)]


def test_runs_are_found_below_folders_and_not_inside_runs(tmp_path):
    first = make_run(tmp_path / "a" / "b" / "one", "local")
    make_run(first / "models" / "inner", "local", seed=3)
    (tmp_path / "a" / "config.toml").write_text("x = 1\n")  # of something else
    assert find([tmp_path, tmp_path / "a", first]) == [first]


def test_different_data_are_never_together(tmp_path):
    make_run(tmp_path / "a", "permfl", 0)
    make_run(tmp_path / "b", "local", 0, partition="labels:5")
    make_run(tmp_path / "c", "permfl", 1)
    make_run(tmp_path / "d", "permfl", 0, model="dnn")
    found = studies([tmp_path])
    assert [[v.name for v in s.variants] for s in found] == [["permfl"], ["local"], ["permfl"]]
    assert [len(s.variants[0].runs) for s in found] == [2, 1, 1]
    _, _, parts = page_contents.page_of([tmp_path])
    assert "different data" in parts[0].text
    tables = [block for block in every(parts) if isinstance(block, blocks.Table) and block.title == "Summary"]
    assert all("better than Local" not in table.columns for table in tables)
    assert not any("Local" in title for title in of_kind(parts, blocks.Heat))


def test_data_that_only_seem_the_same_are_told_apart(tmp_path):
    make_run(tmp_path / "a", "permfl", 0)
    changed = make_run(tmp_path / "b", "local", 0)
    assert len(studies([tmp_path])) == 1
    text = (changed / "devices.csv").read_text()
    (changed / "devices.csv").write_text(text.replace("d0,0,10,", "d0,0,11,"))
    assert len(studies([tmp_path])) == 2
    for name, method in (("c", "permfl"), ("d", "local")):  # no name of the data: what the devices hold decides
        make_run(tmp_path / "python" / name, method, 0, data="python")
    make_run(tmp_path / "python" / "e", "local", 1, data="python")
    make_run(tmp_path / "python" / "f", "local", 2, done=2, data="python")
    assert sorted(len(s.variants) for s in studies([tmp_path / "python"])) == [1, 1, 2]


def test_settings_make_names_and_copies_count_once(tmp_path):
    make_run(tmp_path / "a", "permfl", 0)
    make_run(tmp_path / "copy", "permfl", 0, workers=2)
    make_run(tmp_path / "b", "permfl", 0, set={"device_lr": 0.2})
    (found,) = studies([tmp_path])
    assert [v.name for v in found.variants] == ["permfl (device_lr=0.1)", "permfl (device_lr=0.2)"]
    assert [len(v.runs) for v in found.variants] == [1, 1]
    assert "a second time" in found.notes[0]


def test_unfinished_and_cut_runs_are_shown_as_such(tmp_path):
    make_run(tmp_path / "a", "permfl", 0)
    half = make_run(tmp_path / "b", "permfl", 1, done=3)
    with (half / "metrics.jsonl").open("a") as file:
        file.write('{"round": 4, "personal": {"te')
    make_run(tmp_path / "empty", "local", 0, done=0)
    title, subtitle, parts = page_contents.page_of([tmp_path])
    assert subtitle == "2 methods · 3 runs · 2 unfinished"
    assert any("cut in the middle of a line" in part.text for part in parts if isinstance(part, blocks.Text))
    rows = rows_by_name(of_kind(parts, blocks.Table)["Summary"])
    assert rows["permfl, seed 1, unfinished"]["rounds"].text == "3 of 5"
    assert rows["local, seed 0, unfinished"]["rounds"].text == "0 of 5"
    lines = {series.name: series for series in of_kind(parts, blocks.Lines)["Test accuracy by round"].series}
    late = lines["permfl, seed 1, unfinished"]
    assert late.dashed
    assert late.like == "permfl"
    assert late.x == [1, 2, 3]
    assert not lines["permfl"].low  # one finished seed: no band, and no figure of the other
    render(title, parts)


def test_nothing_but_an_empty_run(tmp_path):
    make_run(tmp_path / "run", "permfl", done=0)
    title, _, parts = page_contents.page_of([tmp_path])
    assert "0 of 5" in render(title, parts)


def test_no_test_split_and_losses_alone(tmp_path):
    make_run(tmp_path / "a", "permfl", splits=("train",))
    assert "Train accuracy by round" in of_kind(page_contents.page_of([tmp_path])[2], blocks.Lines)
    path = make_run(tmp_path / "b" / "loss", "fedavg", 1, data="own.npz")
    for name in ("metrics.jsonl", "summary.json"):
        text = (path / name).read_text()
        (path / name).write_text(re.sub(r'"accuracy\w*": [0-9.e-]+(, )?', "", text).replace(", }", "}"))
    text = (path / "devices.csv").read_text()
    (path / "devices.csv").write_text(text.replace(",global_accuracy", "").replace(",0.6", ""))
    title, _, parts = page_contents.page_of([tmp_path / "b"])
    assert "Test loss by round" in of_kind(parts, blocks.Lines)
    assert rows_by_name(of_kind(parts, blocks.Table)["Summary"])["fedavg"]["global"].text.startswith("1.")
    render(title, parts)


def test_long_histories_and_many_devices_are_thinned(tmp_path):
    make_run(tmp_path / "a", "permfl", rounds=1000, done=1000)
    (found,) = studies([tmp_path])
    line = curves.line(found.variants[0], curves.picker("personal", "test", ACCURACY))
    assert line is not None
    assert len(line.x) <= curves.POINTS
    assert (line.x[0], line.x[-1]) == (1, 1000)
    run = found.variants[0].runs[0]
    many = {f"d{k}": k / 100 for k in range(5000)}
    strip = device_charts.strip({"permfl": {0: many}}, None, 0, ACCURACY)
    assert strip is not None
    assert len(strip.columns) == len(strip.values[0]) == device_charts.CELLS
    assert strip.columns[0] == "15 devices, d0 .. d14"
    assert run.finished


def test_matrices_of_many_clients_are_means(tmp_path):
    rng = np.random.default_rng(5)
    base, pairs = rng.random(9), np.array([(0, 1), (3, 2), (8, 0), (4, 5)])
    learned = Collaboration(np.arange(9), base, pairs, rng.random(4))
    dense, block = learned.dense(), np.array([0, 0, 1, 1, 1, 2, 2, 2, 2])
    assert heatmap.means(learned, np.arange(9), 9) == pytest.approx(dense, nan_ok=True)
    wanted = [[np.nanmean(dense[np.ix_(block == a, block == b)]) for b in range(3)] for a in range(3)]
    assert heatmap.means(learned, block, 3) == pytest.approx(np.array(wanted))


def test_real_runs(tmp_path):
    runs = {
        "local": ("local", "--devices", 6, "--teams", 2),
        "sfedhp": ("sfedhp", *SMALL, "--codec", "sparse", "--set", "device_sparsity=0.9", "--set", "threshold=0.5"),
        "several": ("mfa-rr", "--devices", 6, "--models", 2),
        "deep": ("permfl", "--devices", 8, "--teams", "2x2", *QUICK),
    }
    for name, args in runs.items():
        call("run", *args, "--rounds", 2, "--out", tmp_path / name, "--quiet")
    call("report", tmp_path, "-o", tmp_path / "report.html", "--tables", tmp_path / "tables")
    _, _, parts = page_contents.page_of([tmp_path])
    tables = of_kind(parts, blocks.Table)
    zeros = {row[0]: row for row in tables["Zeros in the models"].rows}
    assert all(cell.value is not None for cell in zeros["sfedhp"][1:4])  # type: ignore[union-attr]
    sizes = of_kind(parts, blocks.Panels)["Size of messages by round"]
    assert [chart.title for chart in sizes.charts] == ["server-team", "team-device"]
    assert len(tables["Several models"].rows) == 2
    trees = [tiers for block in every(parts) if isinstance(block, blocks.Tree) for _, tiers, _ in block.methods]
    assert [("server", 1), ("team1", 2), ("team2", 4), ("device", 8)] in trees
    assert "Zeros in the models" in (tmp_path / "tables" / "tables.md").read_text()


# -- bad input ----------------------------------------------------------------------------------------


def test_advice(tmp_path):
    (tmp_path / "empty").mkdir()
    page = tmp_path / "report.html"
    assert "there is no run folder in" in call("report", tmp_path / "empty", "-o", page, code=2).stderr
    assert "there is no folder" in call("report", tmp_path / "none", "-o", page, code=2).stderr
    run = make_run(tmp_path / "runs" / "a", "permfl")
    assert "create it first" in call("report", run, "-o", tmp_path / "no" / "a.html", code=2).stderr
    assert "give a file" in call("report", run, "-o", tmp_path, code=2).stderr
    wrong = call("report", run, "-o", page, "--figures", tmp_path / "figures", "--format", "gif", code=2)
    assert "allowed: png, svg, pdf" in wrong.stderr
    text = (run / "devices.csv").read_text()
    (run / "devices.csv").write_text(text[: len(text) // 2])
    assert "devices.csv is damaged" in call("report", run, "-o", page, code=2).stderr
    (run / "devices.csv").unlink()
    assert "devices.csv cannot be read" in call("report", run, "-o", page, code=2).stderr
    (run / "summary.json").write_text("{")
    assert "summary.json cannot be read" in call("report", run, "-o", page, code=2).stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "runs"]  # nothing was written


def test_show_of_several(tmp_path):
    make_all(tmp_path / "runs")
    output = call("show", tmp_path / "runs").stdout
    assert "digits, mclr, 6 devices, labels:2" in output
    assert "better than Local" in output
    assert "bytes until 45 %" in call("show", tmp_path / "runs", "--until", 0.45).stdout
    both = call("show", tmp_path / "runs" / "permfl-0", tmp_path / "runs" / "local-0").stdout
    assert "fedavg" not in both
    (tmp_path / "empty").mkdir()
    assert "there is no run folder in" in call("show", tmp_path / "empty", code=2).stderr


# -- texts and figures --------------------------------------------------------------------------------

TABLE = blocks.Table(
    "50 % & more",
    ["method_a", "value"],
    [["a|b", blocks.Cell("1.5 ± 0.2 %", 1.5, "good")], ["c<d", blocks.Cell("-")]],
    "x_1",
)


def test_markdown():
    assert markdown_latex.markdown(TABLE).splitlines() == [
        "**50 % & more**",
        "",
        r"| method\_a | value |",
        "| --- | ---: |",
        r"| a\|b | **1.5 ± 0.2 %** |",
        r"| c\<d | - |",
        "",
        r"x\_1",
    ]


def test_latex():
    text = markdown_latex.latex(TABLE)
    assert r"\caption{50 \% \& more. x\_1}" in text
    assert r"\begin{tabular}{lr}" in text
    assert r"a\textbar{}b & \textbf{1.5 $\pm$ 0.2 \%} \\" in text
    assert text.count(r"\toprule") == text.count(r"\midrule") == text.count(r"\bottomrule") == 1


def test_every_chart_is_drawn(tmp_path):
    charts = figures.charts_in(page_contents.page_of([make_all(tmp_path / "runs", [0])])[2])
    assert {type(chart) for chart in charts} == set(figures.CHARTS)
    for kind, chart in {type(chart): chart for chart in charts}.items():
        figures.save(chart, tmp_path / f"{kind.__name__}.png")
        assert (tmp_path / f"{kind.__name__}.png").stat().st_size > 2000


@pytest.mark.parametrize("form", figures.FORMATS)
def test_figures_are_the_same_bytes(tmp_path, form):
    line = blocks.Series("a", [1, 2, 3], [1.0, None, 2.0], [0.5, None, 1.0], [1.5, None, 3.0])
    found = []
    for name in ("a", "b"):
        figures.save(blocks.Lines("t", "round", "loss", [line], scale="log"), tmp_path / f"{name}.{form}")
        found.append((tmp_path / f"{name}.{form}").read_bytes())
    assert found[0] == found[1]
    assert found[0].startswith({"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[form])


def test_figures_of_the_command_and_their_extra(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run", "local")
    call("report", run, "-o", tmp_path / "a.html", "--figures", tmp_path / "figures", "--format", "svg")
    names = sorted(path.name for path in (tmp_path / "figures").iterdir())
    assert names[0] == "01-test-accuracy-by-round.svg"
    assert all(name.endswith(".svg") for name in names)
    with pytest.raises(ValueError, match=r"\.png, \.svg or \.pdf"):
        figures.save(blocks.Lines("", "x", "y", []), tmp_path / "a.bmp")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"polytier\[plots\]"):
        figures.save(blocks.Lines("", "x", "y", []), tmp_path / "a.png")
    more = ("--figures", tmp_path / "new", "--tables", tmp_path / "new")
    assert "polytier[plots]" in call("report", run, "-o", tmp_path / "b.html", *more, code=2).stderr
    assert not (tmp_path / "new").exists()
    assert not (tmp_path / "b.html").exists()


# -- in a browser -------------------------------------------------------------------------------------


def column(page: Any, k: int) -> list[str]:
    return page.locator(f"#summary tbody tr > :nth-child({k})").all_inner_texts()


def test_page_sorts_by_click_and_by_keyboard(visit, report):
    page = visit(report.as_uri())
    assert page.title() == "digits, mclr, 6 devices, labels:2"
    head = page.locator("#summary thead th").first
    head.get_by_role("button").click()
    names = column(page, 1)
    assert names == sorted(names)
    assert head.get_attribute("aria-sort") == "ascending"
    page.keyboard.press("Enter")  # the button has the focus
    assert column(page, 1) == names[::-1]
    assert head.get_attribute("aria-sort") == "descending"
    page.locator("#summary thead button", has_text="personal").focus()
    page.keyboard.press("Space")
    assert head.get_attribute("aria-sort") is None
    values = column(page, 2)
    assert values[-1] == "-"  # what has none is last
    numbers = [float(value.split()[0]) for value in values[:-1]]
    assert numbers == sorted(numbers, reverse=True)


def test_page_charts_and_legends(visit, report):
    page = visit(report.as_uri())
    chart = page.locator("#test-accuracy-by-round")
    assert chart.locator("path.line").count() == 4
    label = chart.locator("svg[role=img]").get_attribute("aria-label")
    assert re.match(r"Test accuracy by round: test accuracy, % by round. Last: .*permfl 5[0-9]", label)
    entry = chart.get_by_role("button", name="fedavg")
    entry.click()
    assert entry.get_attribute("aria-pressed") == "false"
    assert chart.locator("path.line").count() == 3
    chart.locator("svg[role=img]").focus()
    page.keyboard.press("End")
    tip = chart.locator(".tip")
    assert "round 5" in tip.inner_text()
    assert "permfl" in tip.inner_text()
    assert "fedavg" not in tip.inner_text()
    page.keyboard.press("Escape")
    assert tip.is_hidden()
    chart.locator("svg[role=img]").hover(position={"x": 300, "y": 100})
    assert tip.is_visible()
    empty = page.evaluate(
        "[...document.querySelectorAll('svg[role=img]')].filter((e) => !e.getAttribute('aria-label')).length"
    )
    assert empty == 0


def test_page_slides_through_matrices(visit, report):
    page = visit(report.as_uri())
    block = page.locator("figure.matrices")
    picture = block.locator("image")
    slider = block.get_by_role("slider")
    assert block.locator("output").inner_text().startswith("round 4")
    last = picture.get_attribute("href")
    slider.focus()
    page.keyboard.press("ArrowLeft")
    assert block.locator("output").inner_text().startswith("round 2")
    assert picture.get_attribute("href") != last
    page.keyboard.press("ArrowRight")
    assert picture.get_attribute("href") == last


def test_page_in_the_dark_and_on_a_phone(visit, report):
    page = visit(report.as_uri(), color_scheme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(ground)
    strip = page.locator("figure.heat image").first.get_attribute("href")
    page.locator("#theme").click()
    assert page.evaluate(ground) != dark
    assert page.locator("figure.heat image").first.get_attribute("href") != strip
    assert page.locator("#theme").inner_text() == "Dark"
    phone = visit(report.as_uri(), viewport={"width": 380, "height": 800})
    assert phone.evaluate("document.documentElement.scrollWidth <= innerWidth")
    outside = "(e) => !e.closest('.scroll') && e.getBoundingClientRect().right > innerWidth"
    assert phone.evaluate(f"[...document.querySelectorAll('main *')].filter({outside}).length") == 0
    phone.keyboard.press("Tab")
    assert phone.evaluate("document.activeElement.className") == "skip"


def test_page_holds_any_text(visit, tmp_path):
    evil = "</script><img src=x onerror=alert(1)>&<b>'\"\u2028"
    lines = blocks.Lines(
        evil, "x", "y", [blocks.Series(evil, [1, 2], [1.0, None]), blocks.Series("b", [1, 2], [0.5, 2])]
    )
    parts = [
        blocks.Heading(evil),
        blocks.Text(evil),
        blocks.Table(evil, [evil], [[evil]]),
        lines,
        blocks.Panels("p", [lines]),
        blocks.Lines("log", "x", "y", lines.series, scale="log"),
        blocks.Heat(evil, [evil], [evil], [[float("nan")]]),
        blocks.Matrices(evil, [(evil, [[None, 1.0], [0.5, None]])]),
        blocks.Section(evil, [blocks.Text(evil)], folded=True),
    ]
    (tmp_path / "page.html").write_text(render(evil, parts, evil), encoding="utf-8")
    page = visit((tmp_path / "page.html").as_uri())
    assert page.locator("h1").text_content() == evil
    assert page.locator("img").count() == 0
    page.locator("summary").click()
    assert page.locator("details p").text_content() == evil


# -- live ---------------------------------------------------------------------------------------------


@pytest.fixture
def watch(tmp_path):
    started = []

    def go(folder: Path) -> tuple[Any, str]:
        command = [sys.executable, "-m", "polytier", "watch", str(folder), "--port", "0", "--no-browser"]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stderr is not None
        address = re.search(r"http://127\.0\.0\.1:\d+/", process.stderr.readline())
        assert address is not None
        return process, address.group()

    yield go
    for process in started:
        process.kill()
        process.communicate()


def test_watch_follows_a_run(visit, watch, tmp_path):
    folder = tmp_path / "run"
    process, address = watch(folder)
    page = visit(address)
    assert "there is no folder" in page.locator("main").inner_text()  # not yet
    make_run(folder, "cobo", done=2)
    page.wait_for_selector("text=2 of 5")
    page.locator("#summary thead button").first.click()
    page.evaluate("scrollTo(0, 150)")
    shutil.rmtree(folder)
    make_run(folder, "cobo")
    page.wait_for_selector("figure.matrices")
    assert page.locator("#summary thead th").first.get_attribute("aria-sort") == "ascending"
    assert page.evaluate("scrollY") == 150
    slider = page.get_by_role("slider")
    slider.focus()
    page.keyboard.press("ArrowLeft")
    shown = page.locator("figure.matrices output").inner_text()
    before = page.evaluate("page.live")
    (folder / "config.toml").touch()  # anything new
    page.wait_for_function("before => page.live !== before", arg=before)
    assert page.locator("figure.matrices output").inner_text() == shown
    assert page.evaluate("document.activeElement.type") == "range"
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"{address}config.toml")
    page.goto("about:blank")
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0


def test_a_taken_port_is_advice(watch, tmp_path):
    _, address = watch(tmp_path)
    port = address.rsplit(":", 1)[1].strip("/")
    result = call("watch", tmp_path, "--port", port, "--no-browser", code=2)
    assert f"try --port {int(port) + 1}" in result.stderr


def test_panels_that_share_an_axis_show_all_of_each_line_and_say_what_was_reduced():
    from matplotlib.figure import Figure

    charts = [
        blocks.Lines(f"part {k}", "x", "accuracy %", [blocks.Series("one", [0, 1], [50, top])])
        for k, top in enumerate((60, 90))
    ]
    figure = Figure(layout="constrained")
    figures.panels(figure, blocks.Panels("both", charts, "Reduced: 1 seed. " * 20), figures.colours(["one"]))
    assert all(axis.get_ylim()[1] > 90 for axis in figure.axes)
    text = figure.get_supxlabel()
    assert " ".join(text.split()).count("Reduced: 1 seed.") == 20
    assert max(map(len, text.splitlines())) <= figures.CHARACTERS * figure.get_size_inches()[0]
