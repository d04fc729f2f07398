"""The commands of a federation: jobs, keys, status, and advice for what is wrong."""

from __future__ import annotations

import tomllib

import numpy as np
import pytest

pytest.importorskip("cryptography")

from commands import call
from polytier.runs.job import TEMPLATE, check_code, read_job


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_an_example_is_written_and_settled(tmp_path):
    assert "edit it" in call("federation", "init", "job.toml").output
    assert (tmp_path / "job.toml").read_text() == TEMPLATE
    assert "permfl for 4 devices in 2 teams" in call("federation", "init", "job.toml").output
    settled = tomllib.loads((tmp_path / "job.toml").read_text())
    assert settled["batching"] == "stacked"
    assert settled["codec"] == "float32"
    assert settled["set"]["device_lr"] == 0.01
    job = read_job(tmp_path / "job.toml")
    assert job.tree.names[2].tolist() == ["ann", "bob", "cleo", "dan"]
    call("federation", "init", "job.toml")
    assert tomllib.loads((tmp_path / "job.toml").read_text()) == settled


def test_code_that_is_not_that_of_the_job_is_refused(tmp_path, monkeypatch):
    code = "import torch\n\ndef make(shape, num_classes):\n    return torch.nn.Linear(shape[0], num_classes)\n"
    (tmp_path / "own_model_of_a_job.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "job.toml").write_text(TEMPLATE.replace('"mclr"', '"own_model_of_a_job:make"'))
    call("federation", "init", "job.toml")
    job = read_job(tmp_path / "job.toml")
    assert list(job.network["code"]) == ["own_model_of_a_job"]
    check_code(job)
    (tmp_path / "own_model_of_a_job.py").write_text(code + "# another version\n")
    with pytest.raises(ValueError, match="install the same version"):
        check_code(job)


def test_a_method_without_teams_says_whom_devices_dial(tmp_path):
    text = TEMPLATE.replace('"permfl"', '"fedavg"').replace("team_rounds = 2\n", "")
    (tmp_path / "job.toml").write_text(text)
    assert "devices dial the server; with relay = true" in call("federation", "init", "job.toml").output
    (tmp_path / "job.toml").write_text(text.replace("quorum = 0.5", "quorum = 0.5\nrelay = true"))
    assert "devices dial their teams" in call("federation", "init", "job.toml").output


def test_keys_from_the_command_line(tmp_path):
    call("federation", "ca")
    for name in ("server", "team/north", "device/ann"):
        call("federation", "enrol", name)
    assert sorted(path.name for path in (tmp_path / "federation" / "device-ann").iterdir()) == [
        "ca.pem",
        "cert.pem",
        "key.pem",
    ]
    call("federation", "enrol", "device/bob", "--request", "--folder", "bob")
    assert "certificate of device/bob" in call("federation", "sign", "bob/device-bob.csr").output
    assert (tmp_path / "bob" / "device-bob.crt").exists()
    before = (tmp_path / "federation" / "device-ann" / "cert.pem").read_bytes()
    assert "need not be started again" in call("federation", "enrol", "device/ann", "--renew").output
    assert (tmp_path / "federation" / "device-ann" / "cert.pem").read_bytes() != before
    call("federation", "revoke", "device/bob")  # its key is elsewhere
    call("federation", "revoke", "device/ann")
    listed = (tmp_path / "federation" / "revoked.txt").read_text()
    assert len(listed.split()) == 3
    assert (tmp_path / "federation" / "server" / "revoked.txt").read_text() == listed
    assert (tmp_path / "federation" / "team-north" / "revoked.txt").read_text() == listed
    for words, text in (
        (("ca",), "has an authority already"),
        (("enrol", "server"), "exists already"),
        (("enrol", "ann"), "device/NAME"),
        (("enrol", "device/bob", "--renew"), "once more"),
        (("revoke", "device/eve"), "was enrolled here"),
        (("sign", "job.toml"), "no request"),
        (("status", "."), "no run folder of `polytier serve`"),
    ):
        assert text in call("federation", *words, code=2).output


ROSTER = 'teams = {north = ["ann", "bob"], south = ["cleo"]}'
WRONG = {
    "no table [network]": 'algorithm = "permfl"',
    "needs a roster": "[network]\nshape = [2]",
    "no key of": f"[network]\n{ROSTER}\nshapes = [2]",
    "in the roster twice": '[network]\nteams = {north = ["ann"], south = ["ann"]}',
    "has no devices": "[network]\nteams = {north = []}",
    "no name of a node": '[network]\ndevices = ["../ann"]',
    "the same number of teams": '[network]\nteams = {north = ["ann"], south = {west = ["bob"]}}',
    "a share from 0 to 1": f"[network]\n{ROSTER}\nquorum = 2",
    "one of float32": f'[network]\n{ROSTER}\ndtype = "object"',
    "is a file": f'device_participation = "table:x.npy"\n[network]\n{ROSTER}',
    "one value per node": f"[set]\ndevice_lr = [0.1, 0.2, 0.3]\n[network]\n{ROSTER}",
    "tokens cannot be standardised": f'standardize = true\n[network]\ndtype = "int64"\n{ROSTER}',
    "no algorithm": f'algorithm = "fedavgg"\n[network]\n{ROSTER}',
    "true groups": f'algorithm = "oracle"\n[network]\n{ROSTER}',
}


@pytest.mark.parametrize("text", WRONG)
def test_jobs_that_cannot_be_run_say_so_at_the_start(tmp_path, text):
    (tmp_path / "job.toml").write_text(WRONG[text])
    assert text in call("federation", "init", "job.toml", code=2).output


def test_serve_and_join_say_what_is_missing(tmp_path):
    (tmp_path / "job.toml").write_text(TEMPLATE)
    np.savez(tmp_path / "ann.npz", x=np.zeros((4, 8)), y=np.zeros(4, dtype=int))
    call("federation", "ca", "--folder", "keys")
    call("federation", "enrol", "server", "--folder", "keys")
    for words, text in (
        (("serve",), "give JOB.toml"),
        (("serve", "--team", "north"), "--parent is missing"),
        (("serve", "job.toml", "--listen", "here"), "give HOST:PORT"),
        (("serve", "job.toml"), "federation enrol"),
        (("serve", "job.toml", "--keys", "keys/server"), "federation init"),
        (("join", "--parent", "127.0.0.1:1", "--data", "no.npz", "--name", "ann"), "there is no file no.npz"),
        (("join", "--parent", "127.0.0.1:1", "--data", "ann.npz"), "give --name"),
        (("join", "--parent", "127.0.0.1:1", "--data", "ann.npz", "--name", "ann"), "federation enrol"),
    ):
        assert text in call(*words, code=2).output


def test_data_that_are_not_those_of_the_job_get_advice(tmp_path):
    (tmp_path / "job.toml").write_text(TEMPLATE)
    job = read_job(tmp_path / "job.toml")
    for x, y, text in (
        (np.zeros((4, 7)), np.zeros(4, dtype=int), "samples have shape"),
        (np.zeros((4, 8), dtype=np.uint8), np.zeros(4, dtype=int), "samples have shape"),
        (np.zeros((4, 8)), np.zeros(4), "samples have shape"),
        (np.zeros((4, 8)), np.full(4, 5), "label 5"),
    ):
        np.savez(tmp_path / "ann.npz", x=x, y=y)
        with pytest.raises(ValueError, match=text):
            job.federation("ann", tmp_path / "ann.npz")


def test_a_device_enters_and_leaves_the_roster_with_its_keys(tmp_path):
    (tmp_path / "job.toml").write_text(TEMPLATE)
    call("federation", "ca")
    assert "takes it in" in call("federation", "enrol", "device/eve", "--job", "job.toml", "--team", "north").output
    assert "eve" in read_job(tmp_path / "job.toml").tree.names[-1]
    assert (tmp_path / "federation" / "device-eve" / "key.pem").exists()
    assert "no longer" in call("federation", "revoke", "device/eve", "--job", "job.toml").output
    assert "eve" not in read_job(tmp_path / "job.toml").tree.names[-1]
    words = ("federation", "enrol", "team/north", "--job", "job.toml")
    assert "--job is for devices" in call(*words, code=2).output
