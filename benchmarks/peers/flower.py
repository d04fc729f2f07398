"""Flower 1.41 (flwr[simulation], with torch) on the common work."""

from __future__ import annotations

import time
from functools import cache

from peers.work import BATCH, CLASSES, DEVICES, FEATURES, LR, ROUNDS, SAMPLES, STEPS, WARM, data, speed_of


def speed() -> float:
    """Device steps a second of its FedAvg on Ray, a client a core at a time, one torch thread each."""
    import torch
    from flwr.client import ClientApp, NumPyClient
    from flwr.common import ndarrays_to_parameters
    from flwr.server import ServerApp, ServerAppComponents, ServerConfig
    from flwr.server.strategy import FedAvg
    from flwr.simulation import run_simulation

    ends = []

    class Clock(FedAvg):
        def aggregate_fit(self, *args):
            result = super().aggregate_fit(*args)
            ends.append(time.perf_counter())
            return result

    def server(_):
        start = [torch.zeros(CLASSES, FEATURES).numpy(), torch.zeros(CLASSES).numpy()]
        strategy = Clock(
            fraction_fit=1.0,
            fraction_evaluate=0.0,
            min_fit_clients=DEVICES,
            min_available_clients=DEVICES,
            initial_parameters=ndarrays_to_parameters(start),
        )
        return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=WARM + ROUNDS))

    class Device(NumPyClient):
        def __init__(self, number):
            self.x, self.y, self.model = *(a[number] for a in tensors()), module()

        def fit(self, parameters, config):
            for p, value in zip(self.model.parameters(), parameters, strict=True):
                p.data = torch.from_numpy(value.copy())
            optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)
            order = torch.randperm(SAMPLES)
            for s in range(STEPS):
                i = order[s * BATCH : (s + 1) * BATCH]
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(self.model(self.x[i]), self.y[i]).backward()
                optimizer.step()
            return [p.detach().numpy() for p in self.model.parameters()], SAMPLES, {}

    run_simulation(
        ServerApp(server_fn=server),
        ClientApp(client_fn=lambda context: Device(int(context.node_config["partition-id"])).to_client()),
        DEVICES,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )
    return speed_of(ends)


@cache  # once a process
def tensors():
    import torch

    torch.set_num_threads(1)
    return tuple(torch.from_numpy(a) for a in data())


@cache
def module():
    import torch

    return torch.nn.Linear(FEATURES, CLASSES)
