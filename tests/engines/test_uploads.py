"""Uploads in a run: the same bits on every engine, models alone, devices alone, and advice where there is no change."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import outside
from polytier import ALGORITHMS, IFCA, SCAFFOLD, Algorithm, CoBo, FedAvg, Federation, PerMFL, PFedBayes, check_algorithm
from polytier.engines.exchange import Exchange
from polytier.engines.protocol import engine_of
from polytier.messages.codec import CODECS
from polytier.messages.transforms import parse_upload
from polytier.method.call import Call, Clock
from polytier.runs.contract import differing, memory_of
from polytier.runs.loop import make_loop, train
from polytier.stack.rows import as_dict, pack
from polytier.tree import random
from short_methods import short

UPLOAD = "clip:0.05,noise:0.5"
REFUSED = ("al2gd", "cobo", "demlearn", "fc", "validation")
PERMFL = PerMFL(0.1, 0.1, device_steps=2, team_rounds=2)
PART: Any = {"team_participation": 0.75, "device_participation": 0.6}


def federation_of(num: int = 12, teams: int = 4) -> Federation:
    rng = np.random.default_rng(1)
    sizes = np.array([8, 11, 8])[np.arange(num) % 3]
    device = np.repeat(np.arange(num), sizes)
    split = np.concatenate([np.repeat([0, 1, 2], [n - 4, 2, 2]) for n in sizes])
    x, y = rng.normal(size=(len(device), 2)), rng.integers(0, 3, len(device))
    return Federation.from_arrays(x, y, device, team=device % teams, split=split, cluster=device % 3, num_classes=3)


def left(algorithm: Any, rounds: int = 2, federation: Federation | None = None, **settings: Any) -> dict[str, Any]:
    """All that a run comes to."""
    settings = {"model": "mclr", "batch_size": 4, "batching": "eager", **PART, **settings}
    with make_loop(algorithm, federation or federation_of(), **settings) as training:
        training.run(rounds)
        found: dict[str, Any] = pack("state", training.state) | memory_of(training)
        for part in training.context.parts:
            found |= {f"{part.name}>{k}": v for k, v in part.ledger.state().items()}
    return found | {f"{k} {r['round']}": v for r in training.history for k, v in r.items() if k != "seconds"}


@dataclass
class Seen:
    tier: int
    sent: dict[str, Tensor]
    answer: dict[str, Tensor]
    arrived: dict[str, Tensor]
    call: Call


@pytest.fixture
def seen(monkeypatch) -> list[Seen]:
    """Every answer of a run, before and after it was sent up."""
    found: list[Seen] = []
    up = Exchange.up

    def watched(self, context, call, start, end, answer):
        arrived, nbytes = up(self, context, call, start, end, answer)
        part = call.part(start, end)
        sent = {k: v[part.sender] for k, v in as_dict(part.rows).items()}
        found.append(Seen(call.tier, sent, as_dict(answer), as_dict(arrived), part))
        return arrived, nbytes

    monkeypatch.setattr(Exchange, "up", watched)
    return found


# -- the same bits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [None, "int8", "top:0.3", "sparse16"])
def test_tiles_and_loopback_change_no_bit(codec):
    settings: Any = {"upload": UPLOAD, "codec": codec}
    first = left(PERMFL, **settings)
    assert differing(first, left(PERMFL, **settings | {"upload": None}))  # it does something
    layouts: list[dict[str, Any]] = [{"tile": 1}, {"tile": 1000}, {"inner_tile": 1}, {"engine": "loopback"}]
    for other in layouts:
        assert not differing(first, left(PERMFL, **settings, **other)), other


def test_workers_change_no_bit():
    settings: Any = {"upload": UPLOAD, "codec": "int8", "federation": federation_of(80, 2), "tile": 4}
    assert not differing(left(PERMFL, **settings), left(PERMFL, **settings, workers=2))


@pytest.mark.parametrize("name", [n for n in ALGORITHMS if n not in (*REFUSED, "mfa-rand", "mfa-rr")])
def test_every_method_that_uploads_models_runs_and_keeps_its_bits(name):
    settings: Any = {"upload": UPLOAD, "codec": "int8", "model": "dnn:3"}
    first = left(short(name), **settings)
    assert not differing(first, left(short(name), **settings, engine="loopback", tile=1))
    assert name == "local" or differing(first, left(short(name), model="dnn:3"))


def test_several_models_each_have_their_changes():
    algorithm = ALGORITHMS["mfa-rr"]({"a": PERMFL, "b": FedAvg(0.1, 2)})  # type: ignore[call-arg]
    first = left(algorithm, upload=UPLOAD, codec="int8")
    assert not differing(first, left(algorithm, upload=UPLOAD, codec="int8", engine="loopback"))


# -- what is transformed ---------------------------------------------------------------------------------


def test_the_change_of_every_device_is_clipped_and_teams_are_not(seen):
    left(PERMFL, upload="clip:0.05")
    devices, teams = ([s for s in seen if s.tier == tier] for tier in (2, 1))
    norms = torch.cat([torch.linalg.vector_norm(s.arrived[""] - s.sent[""], dim=1) for s in devices])
    before = torch.cat([torch.linalg.vector_norm(s.answer[""] - s.sent[""], dim=1) for s in devices])
    assert (before > 0.05).any()
    assert (norms <= 0.05 * (1 + 1e-4)).all()
    assert all(torch.equal(s.arrived[""], s.answer[""]) for s in teams)


def test_the_noise_of_a_run_is_that_of_the_seed_the_device_and_the_clock(seen):
    left(FedAvg(0.1, 2), upload="noise:0.3", seed=7, dtype="float64")
    topology_keys = random.name_keys(np.arange(12))
    rounds = set()
    for s in seen:
        keys = random.node_keys(random.key(7, "upload"), topology_keys[s.call.ids])
        noise = parse_upload("noise:0.3")(torch.zeros_like(s.answer[""]), keys, s.call.clock)
        torch.testing.assert_close(s.arrived[""] - s.answer[""], noise, rtol=0, atol=1e-14)
        rounds.add(s.call.clock.round)
    assert rounds == {0, 1}


def test_the_control_of_scaffold_and_the_choice_of_ifca_travel_as_they_are(seen):
    left(SCAFFOLD(0.1, device_steps=2), upload=UPLOAD)
    for s in seen:
        assert not torch.equal(s.arrived["model"], s.answer["model"])
        assert torch.equal(s.arrived["control"], s.answer["control"])
    seen.clear()
    left(IFCA(0.1, 2), upload="clip:0.01", codec="top:0.2")
    for s in seen:
        assert torch.equal(s.arrived["choice"], s.answer["choice"])
        centre = s.sent["centres"][torch.arange(len(s.answer["choice"])), s.answer["choice"]]
        assert ((s.arrived["model"] - centre).norm(dim=1) <= 0.01001).all()
        assert (s.arrived["model"] != centre).sum(1).max() <= 2  # of 9 values


def test_fields_that_are_one_model_are_clipped_together(seen):
    left(PFedBayes(0.1, device_steps=2), upload="clip:0.001")
    for s in seen:
        parts = [s.arrived[k] - s.sent[k] for k in ("model", "rho")]
        assert (torch.cat(parts, 1).norm(dim=1) <= 0.00101).all()
    assert any((s.answer["rho"] != s.arrived["rho"]).any() for s in seen)


def test_evaluation_and_local_training_are_left_alone(seen):
    plain, transformed = left(ALGORITHMS["local"]()), left(ALGORITHMS["local"](), upload=UPLOAD, codec="int8")
    assert not differing(plain, transformed)
    assert not any(s.call.quiet for s in seen)
    model = make_loop(FedAvg(0.1, 2), federation_of(), "mclr", upload=UPLOAD)
    with model as training:
        call = Call(1, torch.arange(3), "solve", Clock(0), training.state, torch.zeros(3).long(), quiet=True)
        exchange = Exchange(CODECS["int8"], parse_upload(UPLOAD))
        answer = torch.randn(3, 9)
        assert exchange.outgoing(training.context, call, answer) is answer
        other = replace(call, quiet=False, method="probe")  # another program than the tier's own
        assert exchange.outgoing(training.context, other, answer) is answer


# -- advice ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REFUSED)
def test_methods_whose_uploads_are_no_changes_are_refused_before_the_first_round(name):
    with pytest.raises(ValueError, match=f"upload {UPLOAD} acts on .* {type(short(name)).__name__} .*without upload"):
        make_loop(short(name), federation_of(), "mclr", upload=UPLOAD)
    with pytest.raises(ValueError, match=f"codec int8 acts on .* {type(short(name)).__name__} .*another codec"):
        make_loop(short(name), federation_of(), "mclr", codec="int8")
    with pytest.raises(ValueError, match="CoBo"):
        make_loop(ALGORITHMS["mfa-rr"]({"a": FedAvg(), "b": CoBo()}), federation_of(), "mclr", upload="clip:1")  # type: ignore[call-arg]


@dataclass(frozen=True)
class Unnamed(FedAvg):
    """Answers a model under a name under which none was sent."""

    def server(self, x: Any, devices: Any) -> Any:
        return devices.solve({"start": x})["model"].mean(empty=x)

    def device(self, x: Any, local: Any) -> Any:
        return {"model": super().device(x["start"], local)}


@dataclass(frozen=True)
class Named(Unnamed):
    def reference(self, field, sent, answer):
        return sent["start"]


def test_a_model_without_its_counterpart_stops_the_run_with_advice():
    asked: list[dict[str, Any]] = [{"upload": "clip:1"}, {"codec": "int8"}]
    for settings in asked:
        with pytest.raises(ValueError, match=r"Unnamed answers a model 'model' of shape \(9,\) and was sent none"):
            left(Unnamed(0.1, 2), **settings)
    assert left(Named(0.1, 2), upload=UPLOAD, codec="int8")  # which says what it started from


@pytest.mark.parametrize(
    ("transform", "got"),
    [
        (lambda change, keys, clock: change[:, :2], r"torch.float32 \[\d+, 2\]"),
        (lambda change, keys, clock: change.double(), r"torch.float64 \[\d+, 9\]"),
        (lambda change, keys, clock: None, "NoneType"),
    ],
)
def test_a_transform_that_answers_something_else_is_named(transform, got):
    with pytest.raises(ValueError, match=f"returned {got}; return a tensor of the same shape and dtype"):
        left(FedAvg(0.1, 2), upload=transform)


def test_a_transform_that_cannot_be_pickled_needs_one_process():
    with pytest.raises(ValueError, match=r"upload cannot be sent to worker processes .*; define it at the top level"):
        left(FedAvg(0.1, 2), upload=lambda change, keys, clock: change, workers=2)


def test_what_a_run_records():
    for given, recorded in ((UPLOAD, UPLOAD), (outside.Halved(), "python"), (None, None)):
        with make_loop(FedAvg(), federation_of(), "mclr", upload=given, batching="eager") as training:
            assert training.spec.upload == recorded


# -- from outside the package ----------------------------------------------------------------------------


def test_a_method_a_transform_a_codec_and_an_engine_from_outside():
    """Half the change of FedAvg's devices is half its step; the codec rounds to thousandths; the engine counts."""
    settings: Any = {"rounds": 1, "batch_size": 4, "dtype": "float64", "batching": "eager"}
    plain = train(FedAvg(0.1, 2), federation_of(), "mclr", **settings)
    start = plain.context.objective.initial
    halved = train(outside.Averaging(), federation_of(), "mclr", upload=outside.Halved(), **settings)
    torch.testing.assert_close(halved.row() - start, (plain.row() - start) / 2, rtol=1e-9, atol=1e-12)
    rounded = train(outside.Averaging(), federation_of(), "mclr", codec=outside.Whole(), **settings)
    torch.testing.assert_close(rounded.row(), plain.row(), rtol=0, atol=0.0006)
    assert not torch.equal(rounded.row(), plain.row())
    up, down = (rounded.ledger.read(direction=way) for way in ("up", "down"))
    assert (up, down) == (12 * (9 * 2 + 4), 12 * 9 * 4)  # a model in shorts and a number of steps; float32 down
    settings = {"batch_size": 4, "batching": "eager", "upload": outside.Halved(), "codec": outside.Whole()}
    with make_loop(outside.Averaging(), federation_of(), "mclr", **settings, engine=outside.Counting) as training:
        found = training.run(3)
        engine = engine_of(training.context)
        assert isinstance(engine, outside.Counting)
        assert engine.calls == {1: 3}
    expected = train(outside.Averaging(), federation_of(), "mclr", rounds=3, **settings)
    assert torch.equal(found.row(), expected.row())
    parallel = train(outside.Averaging(), federation_of(), "mclr", rounds=3, **settings, workers=2, tile=4)
    assert torch.equal(parallel.row(), expected.row())
    check_algorithm(outside.Averaging(), upload=outside.Halved(), codec=outside.Whole())
    assert issubclass(outside.Averaging, Algorithm)
