"""Every command of the README is run as it stands there, and does what its line says.

A command without an outcome here fails, and so does an outcome without a command. The guide is in test_guide.py.
"""

from __future__ import annotations

import csv
import json
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from commands import call
from doc_pages import ROOT, Outcomes, blocks, lines_of, words
from polytier import Run

README = Outcomes("README.md")
BLOCKS = [lines_of(text) for language, text in blocks("README.md") if language == "sh"]


def table(said: str, first: str) -> list[str]:
    """The cells of the first row that begins with this word."""
    return next(re.split(r"\s{2,}", row.strip()) for row in said.splitlines() if row.startswith(first))


def percent(said: str, row: str) -> float:
    """The first figure of a row."""
    return float(re.findall(r"[\d.]+", table(said, row)[1])[0])


def size(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}[unit]


def same_models(one: str, other: str) -> bool:
    files = [sorted(Path(folder, "models").iterdir()) for folder in (one, other)]
    return [path.read_bytes() for path in files[0]] == [path.read_bytes() for path in files[1]]


def write_files(folder: Path) -> None:
    """What the commands need: examples/, the files of MNIST (with digits of another source) and new.npz."""
    (folder / "examples").symlink_to(ROOT / "examples")
    digits = load_digits()  # type: ignore[var-annotated]
    x = np.pad(digits.images.repeat(3, 1).repeat(3, 2), [(0, 0), (2, 2), (2, 2)])  # type: ignore[union-attr]
    x, y = (x * 15).astype(np.uint8), digits.target.astype(np.uint8)  # type: ignore[union-attr]
    (folder / "DIR").mkdir()
    for prefix, part in {"train": slice(0, 1500), "t10k": slice(1500, None)}.items():
        for name, values in {"images-idx3": x[part], "labels-idx1": y[part]}.items():
            head = bytes([0, 0, 8, values.ndim]) + b"".join(n.to_bytes(4, "big") for n in values.shape)
            (folder / "DIR" / f"{prefix}-{name}-ubyte").write_bytes(head + values.tobytes())
    np.savez(folder / "new.npz", x=(digits.images[:50] / 16).astype(np.float32))  # type: ignore[union-attr]


def test_the_readme_has_no_command_without_an_outcome():
    README.assert_all_used([line for block in BLOCKS for line in block])


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_commands_of_the_readme(number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    for line in BLOCKS[number]:
        README.check(line)


# -- train, predict, export ---------------------------------------------------------------------------


@README.of("run", "run permfl --rounds 20 --out runs/digits")
def _trained(said):
    assert percent(said, "personal") > 60
    assert table(said, "team") != table(said, "global")


@README.of("run permfl --data mnist")
def _mnist(said):
    assert "40 devices in 4 teams, 7,850 parameters, 10 rounds" in said
    assert percent(said, "personal") > 60


@README.of("run permfl --teams 2x4")
def _four_tiers(said):
    assert {"personal", "team1", "team", "global"} <= {row.split(" ")[0] for row in said.splitlines()}
    assert all(table(said, link) for link in ("server-team1", "team1-team2", "team2-device"))


@README.of("run permfl --model dnn --train head")
def _head(said):
    assert "1,010 parameters" in said  # 100 x 10 + 10
    down, _ = (size(text) for text in table(said, "server-team")[1:])
    assert down == pytest.approx(5 * 4 * 4 * 1010, rel=0.05)  # rounds, teams, bytes of a float, parameters


@README.of("run permfl --metric macro_f1")
def _metric(said):
    assert "test macro_f1" in said
    folder = re.search(r"run folder: (\S+)", said)
    assert folder is not None
    last = json.loads(Path(folder[1], "metrics.jsonl").read_text().splitlines()[-1])
    assert {"macro_f1", "accuracy"} <= set(last["personal"]["test"])


@README.of("run permfl --engine ray")
def _ray(said):
    folder = re.search(r"run folder: (\S+)", said)
    assert folder is not None
    assert tomllib.loads(Path(folder[1], "config.toml").read_text())["engine"] == "ray"
    call("run", "permfl", "--rounds", 2, "--quiet", "--out", "runs/stacked")
    assert same_models(folder[1], "runs/stacked")


@README.of("predict runs/digits")
def _predicted(said):
    found = np.load("predicted.npz")
    assert found["scores"].shape == (50, 10)
    np.testing.assert_array_equal(found["y"], found["scores"].argmax(1))
    model = Run.load("runs/digits").model(device=7)
    x = torch.from_numpy(np.load("new.npz")["x"])[:, None]
    with torch.no_grad():
        np.testing.assert_allclose(found["scores"], model(x), rtol=1e-5, atol=1e-6)


@README.of("export runs/digits")
def _exported(said):
    x = torch.from_numpy(np.load("new.npz")["x"])[:, None]
    program = torch.export.load("model.pt2").module()
    with torch.no_grad():
        np.testing.assert_allclose(program(x), np.load("predicted.npz")["scores"], rtol=1e-5, atol=1e-6)


# -- repeat, continue, read ---------------------------------------------------------------------------


@README.of("run fedavg --data synthetic:alpha=1,beta=1 --device-participation 0.1 --out runs/mine")
def _part_of_the_devices(said):
    down, _ = (size(text) for text in table(said, "server-device")[1:])
    assert down == pytest.approx(100 * 4 * 4 * 610, rel=0.05)  # 4 of 40 devices in each of 100 rounds


@README.of("run runs/mine/config.toml")
def _repeated(said):
    assert same_models("runs/mine", "runs/again")


@README.of("resume runs/mine")
def _continued(said):
    assert "continuing after round 100 of 200" in said
    assert len(Path("runs/mine/metrics.jsonl").read_text().splitlines()) == 200


@README.of("show runs/mine --until 0.8")
def _shown(said):
    assert percent(said, "global") > 75
    assert table(said, "server-device")
    assert re.search(r"until 80 % test accuracy +reached in +bytes\nglobal +round \d+ +[\d.]+ .B", said)


@README.of("report runs/mine", "watch runs/mine")
def _page(said):
    page = Path("report.html").read_text()
    assert "The global model of fedavg reaches" in page
    assert said.startswith("the page is report.html") or "The global model of fedavg reaches" in said


# -- what is sent -------------------------------------------------------------------------------------


@README.of("run sfedhp --codec sparse")
def _sparse(said):
    _, personal = re.findall(r"^personal .*", said, re.MULTILINE)
    found = re.fullmatch(r"personal +([\d.]+) % +(\S+ k?B) +(\S+ k?B) +([\d.]+) %", personal.strip())
    assert found is not None, personal
    assert 0 < float(found[1]) < 100
    assert size(found[2]) < size(found[3])
    assert float(found[4]) > 10


@README.of("run fedavg --codec int8")
def _one_byte_a_value(said):
    down, up = (size(text) for text in table(said, "server-device")[1:])
    assert 3.5 < down / up < 4.5
    assert percent(said, "global") > 60


@README.of("run fedavg --upload clip:1.0,noise:0.5")
def _noise(said):
    config = tomllib.loads(Path("runs/fedavg-digits-0-2/config.toml").read_text())
    assert config["upload"] == "clip:1.0,noise:0.5"
    call("run", "fedavg", "--rounds", 20, "--quiet", "--out", "runs/plain")
    assert percent(said, "global") < percent(call("show", "runs/plain").stdout, "global")  # noise has its price


# -- several models, learned teams --------------------------------------------------------------------


@README.of("run examples/several_models.toml")
def _several(said):
    assert table(said, "digits")[1] == "fedavg"
    assert table(said, "synthetic")[1] == "fedprox"
    assert "40 devices" in said


@README.of("gain examples/several_models.toml")
def _gain(said):
    found = re.search(r"gain[^\d]*([\d.]+)", said)
    assert found is not None, said
    assert float(found[1]) > 1


@README.of("run cobo")
def _groups(said):
    assert "4 groups learned of 16 clients; against the true ones: adjusted Rand index 1.00" in said


@README.of("run permfl --devices 16 --partition clusters-permuted:4 --team-formation learned:runs/cobo")
def _learned_teams(said):
    line = next(line for block in BLOCKS for line in block if "learned:runs/cobo" in line)
    random = call(*words(line.replace("learned:runs/cobo", "random"))[1:]).stdout
    assert percent(said, "personal") > percent(random, "personal") + 5
    assert percent(said, "team") > percent(random, "team") + 20


# -- compare, tune, reproduce, check ------------------------------------------------------------------


@README.of("compare permfl,fedavg,local")
def _compared(said):
    assert {row.split(" ")[0] for row in said.splitlines()} >= {"method", "permfl", "fedavg", "local"}
    assert "Wilcoxon" in said
    assert "page: runs/compared/report.html" in said
    assert Path("runs/compared/report.html").exists()
    rows = list(csv.DictReader(Path("runs/compared/compare.csv").read_text().splitlines()))
    assert {row["method"] for row in rows} == {"permfl", "fedavg", "local"}


@README.of("tune permfl")
def _tuned(said):
    assert "train it: polytier run runs/tuned/best.toml" in said
    trials = [json.loads(row) for row in Path("runs/tuned/trials.jsonl").read_text().splitlines()]
    assert len(trials) == 5
    best = tomllib.loads(Path("runs/tuned/best.toml").read_text())["set"]
    assert 0.1 <= best["device_lr"] <= 2
    first, found = (float(re.findall(rf"{which}[^\n]*?([\d.]+) %", said)[0]) for which in ("trial 0:", "\n"))
    assert found >= first


@README.of("run runs/tuned/best.toml")
def _best(said):
    assert percent(said, "personal") > 50


@README.of("reproduce mfa/figure1")
def _reproduced(said):
    assert re.search(r"figure1 .* 2 of 2", said)
    assert Path("runs/reproduce-mfa-quick/report.html").exists()


@README.of("check permfl")
def _conditions(said):
    assert re.search(r"Theorem 1 +beta <= mu_Ft / \(4 \* gamma\) +0.99 +<= [\d.]+ +BROKEN", said)
    assert re.search(r"\d+ of 11 conditions broken", said)


@README.of("bench common")
def _bench(said):
    assert re.search(r"^work +engine .* loop +kernels .*/ loop", said, re.MULTILINE)
    assert re.search(r"^common .*\d", said, re.MULTILINE)


@README.of("list algorithms permfl")
def _fields(said):
    for text in ("device_lr", "alpha", "step size", "0.01", "> 0"):
        assert text in said


@README.of("list settings")
def _settings(said):
    assert all(f"--{name}" in said or name in said for name in ("rounds", "device_participation", "codec", "metric"))


@README.of("schema")
def _schema(said):
    assert "rounds" in json.loads(Path("polytier.json").read_text())["properties"]
