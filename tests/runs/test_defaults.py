"""The table of defaults: what it names exists, what a user says wins, and where values come from is told."""

import dataclasses
from typing import Any

import pytest

from commands import call
from polytier.algorithms import ALGORITHMS
from polytier.data.sources import SOURCES
from polytier.models.zoo import MODELS
from polytier.runs.defaults import TABLE, settings
from polytier.runs.methods import method_of
from polytier.runs.spec import check_spec


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.algorithms[0]}-{row.data[0]}-{row.models[0]}")
def test_all_that_a_row_names_exists_and_is_allowed(row):
    assert set(row.data) <= set(SOURCES)
    assert set(row.models) <= set(MODELS)
    assert row.source
    for name in row.algorithms:
        made = ALGORITHMS[name](**row.fields)
        assert all(getattr(made, field) == value for field, value in row.fields.items())


def test_rows_that_meet_agree_unless_one_is_of_a_number_of_steps():
    for name in ALGORITHMS:
        for data in SOURCES:
            for model in MODELS:
                rows = [row for row in TABLE if row.fits(name, data, model, None)]
                fields = [field for row in rows for field in row.fields]
                assert len(fields) == len(set(fields)), (name, data, model)


def test_values_of_the_papers():
    found = {name: value for name, (value, _) in settings("heurfedamp", "mnist", "dnn:500x200").items()}
    assert found == {"device_lr": 0.05, "device_steps": 5, "self_weight": 0.5}
    assert settings("fedprox", "fashion-mnist", "dnn")["device_pull"][0] == 0.001
    assert settings("ditto", "cifar-100", "resnet9")["device_lr"] == (0.1, "CoBo, Appendix B")
    assert settings("fedavg", "emnist-byclass", "mclr") == {}
    pinned = {field.name: field.default for field in dataclasses.fields(ALGORITHMS["permfl"])}
    for name, (value, _) in settings("permfl", "mnist", "mclr").items():
        assert value == pinned[name]


def test_what_is_said_wins_and_the_rest_is_told_with_its_source(caplog):
    config = check_spec(
        {
            "algorithm": "pfedmt",
            "data": "mnist",
            "model": "cnn-mnist",
            "set": {"team_pull": 0.5},
        }
    )
    with caplog.at_level("INFO", "polytier"):
        method: Any = method_of(config)
    assert (method.team_pull, method.device_pull, method.device_lr) == (0.5, 3.0, 0.01)
    assert [record.message for record in caplog.records] == [
        "pfedmt on mnist with cnn-mnist: device_pull = 3.0 (pFedMT, Table 1)"
    ]


def test_a_run_writes_down_what_the_table_gave(tmp_path):
    out = tmp_path / "run"
    flags = ["--data", "synthetic", "--devices", "4", "--rounds", "1", "--out", str(out)]
    result = call("run", "pfedme", *flags)
    assert "server_lr = 0.5 (pFedMT, Table 1)" in result.stderr
    assert "server_lr = 0.5" in (out / "config.toml").read_text()


def test_list_shows_the_rows_of_a_method():
    assert "sFedHP, Tables II-VII" in call("list", "algorithms", "fedprox").stdout
    assert "Defaults for these data" not in call("list", "algorithms", "mfa-rr").stdout
