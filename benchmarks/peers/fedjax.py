"""FedJAX 0.0.17 on the common work."""

from __future__ import annotations

import time

from peers.work import BATCH, CLASSES, DEVICES, FEATURES, LR, ROUNDS, STEPS, WARM, data, speed_of


def speed() -> float:
    """Device steps a second of its FedAvg, `for_each_client` as it chooses by itself."""
    import fedjax
    import jax
    import jax.numpy as jnp
    from fedjax.algorithms import fed_avg

    def loss(params, batch):
        log_p = jax.nn.log_softmax(batch["x"] @ params["w"] + params["b"])
        return -jnp.take_along_axis(log_p, batch["y"][:, None], 1).mean()

    algorithm = fed_avg.federated_averaging(
        lambda params, batch, rng: jax.grad(loss)(params, batch),
        fedjax.optimizers.sgd(LR),
        fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(batch_size=BATCH, num_epochs=None, num_steps=STEPS),
    )
    x, y = data()
    sets = [fedjax.ClientDataset({"x": x[c], "y": y[c].astype("int32")}) for c in range(DEVICES)]
    state = algorithm.init({"w": jnp.zeros((FEATURES, CLASSES)), "b": jnp.zeros(CLASSES)})
    ends = []
    for number in range(WARM + ROUNDS):
        keys = jax.random.split(jax.random.PRNGKey(number), DEVICES)
        state, _ = algorithm.apply(state, [(b"%d" % c, sets[c], keys[c]) for c in range(DEVICES)])
        jax.block_until_ready(state.params)
        ends.append(time.perf_counter())
    return speed_of(ends)
