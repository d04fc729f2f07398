"""pfl-research (pfl 0.6.0, with torch) on the common work."""

from __future__ import annotations

import time

from peers.work import BATCH, CLASSES, DEVICES, FEATURES, LR, ROUNDS, STEPS, WARM, data, speed_of


def speed() -> float:
    """Device steps a second of its FedAvg in one process, torch's default threads; nothing is evaluated."""
    import torch
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    class Linear(torch.nn.Linear):
        def loss(self, x, y, eval=False):
            return torch.nn.functional.cross_entropy(self(x), y)

        def metrics(self, x, y, eval=False):
            return {}

    ends = []

    class Clock(TrainingProcessCallback):
        def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
            ends.append(time.perf_counter())
            return False, Metrics()

    x, y = (torch.from_numpy(a) for a in data())
    users = list(range(DEVICES))
    federation = FederatedDataset.from_slices(
        {c: (x[c], y[c]) for c in users}, get_user_sampler("minimize_reuse", users)
    )
    module = Linear(FEATURES, CLASSES)
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=WARM + ROUNDS,
            evaluation_frequency=10**9,
            train_cohort_size=DEVICES,
            val_cohort_size=0,
        ),
        SimulatedBackend(federation, federation),
        model,
        NNTrainHyperParams(
            local_batch_size=BATCH, local_num_epochs=None, local_num_steps=STEPS, local_learning_rate=LR
        ),
        callbacks=[Clock()],
        send_metrics_to_platform=False,
    )
    return speed_of(ends)
