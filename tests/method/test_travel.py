"""BatchNorm and layers that stay at home: against plain PyTorch loops, on every layout, and in files."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from algorithms.test_cluster_baselines import NAMES, problem
from polytier import FedAvg, FedBN, Federation, LocalTraining, PerMFL, Run, check_algorithm, train
from polytier.algorithms import ALGORITHMS
from polytier.algorithms.fedavg_ft import FedAvgFT
from polytier.data.batches import Batch, Group, share_of_batch
from polytier.method.travel import HOME, STATISTICS
from polytier.models.zoo import make_model
from polytier.runs.loop import make_loop
from polytier.stack.objective import Objective

SETTINGS: dict[str, Any] = {"dtype": "float64", "batch_size": 4, "seed": 3}
MODEL = "resnet9:width=2,norm=batch"
SHAPE = (1, 8, 8)


def images() -> Federation:
    """Seven devices of 6 to 11 images and 2 test images."""
    xs, ys, bounds, start = [], [], [], 0
    for name in NAMES:
        rng = np.random.default_rng(int(name[1:]))
        size = int(rng.choice([6, 7, 8, 10, 11]))  # torch refuses a batch of one sample
        xs.append(rng.normal(size=(size + 2, *SHAPE)) * (1 + int(name[1:])) + int(name[1:]))
        ys.append(rng.integers(0, 3, size + 2))
        bounds.append([start, start + size, start + size, start + size + 2])
        start += size + 2
    x, y = torch.from_numpy(np.concatenate(xs)), torch.from_numpy(np.concatenate(ys))
    return Federation(x, y, torch.tensor(bounds), np.array(NAMES), num_classes=3)


@pytest.fixture(scope="module")
def federation() -> Federation:
    return images()


def plain_loop(federation, rounds, steps, lr, home=lambda name: False):
    """FedAvg with a plain PyTorch model per device; parts of it for which `home` is true are never averaged."""
    p = problem(federation, {})
    server = make_model(MODEL, SHAPE, 3, seed=3).double()
    devices = {name: copy.deepcopy(server) for name in NAMES}
    for t in range(rounds):
        for name, model in devices.items():
            shared = {k: v for k, v in server.state_dict().items() if not home(k)}
            model.load_state_dict(shared, strict=False)
            optimizer, (x, y) = torch.optim.SGD(model.parameters(), lr), federation.device(NAMES.index(name))
            batches = p.batches(name, t, 0)
            model.train()
            for _ in range(steps):
                index = next(batches)
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x[index]), y[index]).backward()
                optimizer.step()
        total = p.samples(0, "server")
        mean = {
            key: sum(m.state_dict()[key] * (p.samples(1, name) / total) for name, m in devices.items())
            for key in server.state_dict()
            if "tracked" not in key
        }
        server.load_state_dict(mean, strict=False)
    return server.eval(), {name: model.eval() for name, model in devices.items()}


def same(found: nn.Module, expected: nn.Module, x: torch.Tensor) -> None:
    for (name, one), (_, other) in zip(found.state_dict().items(), expected.state_dict().items(), strict=True):
        if "tracked" not in name:
            torch.testing.assert_close(one, other, rtol=0, atol=1e-10, msg=name)
    torch.testing.assert_close(found(x), expected(x), rtol=0, atol=1e-9)


def test_fedavg_with_batch_norm_is_a_plain_loop(federation):
    run = train(FedAvg(0.02, 3), federation, MODEL, rounds=2, **SETTINGS)
    server, _ = plain_loop(federation, 2, 3, 0.02)
    same(run.model(), server, federation.device(0, "test")[0])
    assert len(run.row()) == sum(p.numel() for p in server.parameters())


def test_fedbn_is_a_plain_loop_with_norms_at_home(federation):
    run = train(FedBN(0.02, 3), federation, MODEL, rounds=2, **SETTINGS)
    server, devices = plain_loop(federation, 2, 3, 0.02, home=lambda name: ".bn." in name)
    for name, model in devices.items():
        model.load_state_dict({k: v for k, v in server.state_dict().items() if ".bn." not in k}, strict=False)
        same(run.model(device=name), model, federation.device(0, "test")[0])
    assert run.global_ is None


def test_padded_samples_do_not_count():
    objective = Objective(Normed(), dtype=torch.float64)
    theta, x, y = objective.initial.unsqueeze(0), torch.randn(1, 3, 2, dtype=torch.float64), torch.tensor([[0, 2, 1]])
    found = []
    for padding in (0, 2):
        inputs = torch.cat([x, torch.full((1, padding, 2), 1e6, dtype=torch.float64)], 1)
        targets = torch.cat([y, torch.zeros(1, padding, dtype=torch.int64)], 1)
        weight = share_of_batch(torch.tensor([[3]]), 3 + padding, torch.float64)
        statistics = objective.initial_statistics.unsqueeze(0).clone()
        batch = Batch([Group(slice(None), inputs, targets, weight)], 1)
        found.append((objective.grad(theta, batch, statistics=statistics), statistics))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    assert not torch.equal(found[0][1][0], objective.initial_statistics)


METHODS = [PerMFL(0.05, device_steps=2, team_rounds=2), FedBN(0.05, 2), FedAvgFT(0.05, 2), LocalTraining()]


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.bn, self.head = nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.relu(self.bn(self.body(x))))


@pytest.mark.parametrize("method", METHODS, ids=lambda m: type(m).__name__)
def test_every_layout_has_the_same_bits(method):
    check_algorithm(method, model=Normed(), rounds=2)


@pytest.mark.parametrize("name", ["ditto", "fedprox", "cobo", "ifca", "pfedme", "scaffold", "demlearn", "apfl"])
def test_other_methods_run_with_batch_norm(name):
    check_algorithm(ALGORITHMS[name](), model=Normed(), rounds=2, team_participation=1.0, device_participation=1.0)


@pytest.mark.parametrize("method", METHODS[:2], ids=lambda m: type(m).__name__)
def test_two_processes_and_pipes_have_the_same_bits(method, federation):
    one = train(method, federation, MODEL, rounds=2, **SETTINGS)
    two = train(method, federation, MODEL, rounds=2, workers=2, **SETTINGS)
    assert torch.equal(one.personal, two.personal)  # type: ignore[arg-type]
    for kind, rows in one.statistics.items():
        assert torch.equal(rows, two.statistics[kind]), kind


def test_variances_stay_positive_beyond_a_server_step_of_one(federation):
    method = PerMFL(0.05, server_lr=3.3, team_pull=1.5, device_pull=1.5, device_steps=2, team_rounds=2)
    with make_loop(method, federation, MODEL, **SETTINGS) as training:
        run = training.run(4)
        names = training.context.objective.statistic_names
        sizes = training.context.objective.statistic_sizes
    variance = torch.repeat_interleave(torch.tensor(["var" in n for n in names]), torch.tensor(sizes))
    for rows in run.statistics.values():
        assert bool((rows[:, variance] > 0).all())


def test_layers_at_home_are_in_no_message(federation):
    def sent(method, **more):
        return train(method, federation, MODEL, rounds=1, **SETTINGS, **more).history[-1]["bytes"]["server-device"][
            "up"
        ]

    module = make_model(MODEL, SHAPE, 3, seed=3)
    norms = [m for m in module.modules() if isinstance(m, nn.BatchNorm2d)]
    channels = sum(m.num_features for m in norms)
    everything = sum(p.numel() for p in module.parameters()) + 2 * channels
    assert sent(FedAvg(0.05, 1)) == 7 * 8 * everything
    assert sent(FedBN(0.05, 1)) == 7 * 8 * (everything - 4 * channels)
    assert sent(FedAvg(0.05, 1), local_layers="head.*") == 7 * 8 * (everything - 16 * 3 - 3)


def test_a_folder_has_the_statistics(federation, tmp_path):
    run = train(PerMFL(0.05, device_steps=2), federation, MODEL, rounds=1, **SETTINGS)
    run.save(tmp_path / "run")
    again = Run.load(tmp_path / "run")
    x = federation.device(0, "test")[0]
    for owner in ({"device": NAMES[2]}, {}):
        assert torch.equal(again.model(**owner)(x), run.model(**owner)(x))
    files = load_file(tmp_path / "run" / "models" / "personal.safetensors")
    assert files["body.0.bn.running_var"].shape == (7, 2)


def test_a_run_goes_on_from_its_checkpoint_with_its_statistics(federation):
    settings: dict[str, Any] = {**SETTINGS, "tile": 2}
    with make_loop(FedBN(0.05, 2), federation, MODEL, **settings) as training:
        training.run(1)
        saved = copy.deepcopy(training.snapshot())
        whole = training.run(2)
    with make_loop(FedBN(0.05, 2), federation, MODEL, **settings) as training:
        training.restore(*saved)
        assert {STATISTICS, HOME} <= set(training.context.memory.names(1))
        again = training.run(2)
    assert torch.equal(whole.personal, again.personal)  # type: ignore[arg-type]
    assert torch.equal(whole.statistics["personal"], again.statistics["personal"])


def test_a_frozen_batch_norm_uses_the_statistics_of_its_model():
    module = Normed().double()
    module.bn.running_mean = torch.full((4,), 0.3, dtype=torch.float64)
    module.bn.running_var = torch.full((4,), 2.0, dtype=torch.float64)
    x, y = torch.randn(12, 2, dtype=torch.float64), torch.arange(12) % 3
    data = Federation.from_arrays(x, y, np.arange(12) % 3, shares=(1, 0, 0))
    with make_loop(FedAvg(0.1, 2), data, module, train="head", dtype="float64") as training:
        assert training.context.objective.batching != "eager"
        run = training.run(1)
    trained = run.model()
    assert torch.equal(trained.bn.running_var, module.bn.running_var)  # type: ignore[union-attr]
    assert run.statistics == {}


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"algorithm": "fedavg", "local_layers": "nothing*"}, "no parameter that trains matches the pattern 'nothing"),
        ({"algorithm": "fedavg", "local_layers": "*"}, "nothing would be sent"),
        ({"algorithm": "scaffold", "local_layers": "head.*"}, "SCAFFOLD is not one"),
        ({"algorithm": "cobo", "local_layers": "head.*"}, "CoBo is not one"),
    ],
)
def test_bad_local_layers_give_advice(federation, settings, advice):
    method = settings.pop("algorithm")
    with pytest.raises(ValueError, match=advice):
        train(method, federation, MODEL, rounds=1, **settings)


def test_a_layer_without_statistics_is_refused(federation):
    module = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2, track_running_stats=False), nn.Flatten(), nn.Linear(72, 3)
    )
    with pytest.raises(ValueError, match="BatchNorm2d '1'.*GroupNorm"):
        train("fedavg", federation, module, rounds=1)
