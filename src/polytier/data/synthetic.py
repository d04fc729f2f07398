"""Generated data: synthetic(alpha, beta) of FedProx, and quadratics whose optimum is known."""

from __future__ import annotations

import numpy as np

from polytier.data.federation import Federation

MOST_NUMBERS = 1 << 31  # in all matrices of generated problems: 16 GB
WIDEST = 1e18  # standard deviation of generated data: their squares are numbers of float32 too
PFEDME_FEATURES, PFEDME_CLASSES = 60, 10
SYNTHETIC, QUADRATICS, QUADRATIC_CLUSTERS = 0x51, 0x52, 0x53  # keys: each kind of data has its own random numbers


def synthetic(
    num_devices: int,
    alpha: float = 0.5,
    beta: float = 0.5,
    num_features: int = 60,
    num_classes: int = 10,
    seed: int = 0,
    min_samples: int = 250,
    max_samples: int = 25810,
    iid: bool = False,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Generate synthetic(alpha, beta) (Li et al. 2020, FedProx).

    Device k draws u ~ N(0, alpha), B ~ N(0, beta); W, b ~ N(u, 1), v ~ N(B, 1); x ~ N(v, diag(j^-1.2)),
    y = argmax(softmax(W x + b)). alpha and beta are standard DEVIATIONS, as in the code of FedProx and
    pFedMe, not variances. With `iid` all devices share W, b ~ N(0, 1) and v = 0.
    Sizes follow a power law with density s^-2 between `min_samples` and `max_samples`: 1/s is uniform.
    Every device has its own random generator, so that its data do not depend on the number of devices.

    Returns:
        x [N, F] float32, y [N] int64 and device [N] int64.

    Raises:
        ValueError: an argument is out of range.
    """
    check_synthetic(num_devices, alpha, beta, num_features, num_classes, min_samples, max_samples)
    deviation = np.arange(1, num_features + 1) ** -0.6  # the root of the variances j^-1.2
    shared = np.random.default_rng([seed, SYNTHETIC]).normal(size=(num_features + 1, num_classes))
    xs, ys = [], []
    for k in range(num_devices):
        rng = np.random.default_rng([seed, SYNTHETIC, k + 1])
        u, mean = rng.normal(0, alpha), rng.normal(0, beta)
        weights = shared if iid else rng.normal(u, 1, shared.shape)  # [F + 1, classes]; the last row is b
        v = np.zeros(num_features) if iid else rng.normal(mean, 1, num_features)
        size = round(1 / rng.uniform(1 / max_samples, 1 / min_samples))
        x = rng.normal(v, deviation, (size, num_features))
        xs.append(x.astype(np.float32))
        ys.append((x @ weights[:-1] + weights[-1]).argmax(1))
    device = np.repeat(np.arange(num_devices), [len(y) for y in ys])
    return np.concatenate(xs), np.concatenate(ys).astype(np.int64), device


def synthetic_of_pfedme(
    num_devices: int, alpha: float = 0.5, beta: float = 0.5
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Generate synthetic(alpha, beta) with the generator of pFedMe (T. Dinh et al. 2020), as PerMFL and pFedMT do.

    The distributions are those of `synthetic`, with 60 features and 10 classes; sizes are 5 (50 + lognormal(4, 2)). All
    numbers come from NumPy's legacy generator with seed 0, in the order of the authors' code, so the data are theirs.
    With alpha = beta = 0.5 and 40, 50 or 100 devices, a device has 250 to 25,810 samples.

    Returns:
        x [N, F] float32, y [N] int64 and device [N] int64.

    Raises:
        ValueError: an argument is out of range.
    """
    check_synthetic(num_devices, alpha, beta, PFEDME_FEATURES, PFEDME_CLASSES, 1, 1)
    rng = np.random.RandomState(0)  # noqa: NPY002: these data are defined by the legacy generator
    sizes = 5 * (50 + rng.lognormal(4, 2, num_devices).astype(int))
    u, means = rng.normal(0, alpha, num_devices), rng.normal(0, beta, num_devices)
    v = [rng.normal(mean, 1, PFEDME_FEATURES) for mean in means]
    variances = np.diag(np.arange(1, PFEDME_FEATURES + 1) ** -1.2)
    xs, ys = [], []
    for k, size in enumerate(sizes):
        weights = rng.normal(u[k], 1, (PFEDME_FEATURES, PFEDME_CLASSES))
        bias = rng.normal(u[k], 1, PFEDME_CLASSES)
        x = rng.multivariate_normal(v[k], variances, size)
        xs.append(x.astype(np.float32))
        ys.append((x @ weights + bias).argmax(1))
    return np.concatenate(xs), np.concatenate(ys).astype(np.int64), np.repeat(np.arange(num_devices), sizes)


def check_synthetic(
    num_devices: int, alpha: float, beta: float, features: int, classes: int, smallest: int, largest: int
) -> None:
    """Raise a ValueError if an argument of `synthetic` is out of range."""
    if min(num_devices, features, classes) < 1:
        raise ValueError(
            f"synthetic needs at least 1 device, feature and class; got {num_devices}, {features}, {classes}"
        )
    if not (0 <= alpha <= WIDEST and 0 <= beta <= WIDEST):
        raise ValueError(f"alpha and beta are standard deviations, from 0 to {WIDEST:.0e}; got {alpha} and {beta}")
    if not 1 <= smallest <= largest:
        raise ValueError(f"sizes need 1 <= min_samples <= max_samples; got {smallest} and {largest}")


def check_matrices(number: int, dimension: int) -> None:
    """Raise a ValueError if so many square matrices would be too large."""
    if number * dimension * dimension > MOST_NUMBERS:
        raise ValueError(
            f"{number} devices with a matrix of {dimension} x {dimension} each are too large; ask for fewer devices or "
            "dimensions"
        )


def check_spread(spread: float) -> None:
    if not 0 <= spread <= WIDEST:
        raise ValueError(f"spread is a standard deviation, from 0 to {WIDEST:.0e}; got {spread}")


def quadratics(
    num_devices: int,
    dimension: int,
    seed: int = 0,
    mu: float = 0.1,
    smoothness: float = 1.0,
    spread: float = 1.0,
) -> Federation:
    """Strongly convex f_i(t) = 1/2 t' A_i t - b_i' t with one training sample per device: x = A_i, y = b_i, float64.

    The smallest eigenvalue of every A_i is mu, the largest is smoothness (in one dimension it is drawn between them).
    b_i = b + spread * noise_i: with spread 0 all devices have the same b.

    Raises:
        ValueError: an argument is out of range.
    """
    import torch

    if num_devices < 1 or dimension < 1:
        raise ValueError(f"quadratics need at least 1 device and 1 dimension; got {num_devices} and {dimension}")
    if not 0 < mu <= smoothness <= WIDEST:
        raise ValueError(f"strong convexity needs 0 < mu <= smoothness <= {WIDEST:.0e}; got {mu} and {smoothness}")
    check_spread(spread)
    check_matrices(num_devices, dimension)
    rng = np.random.default_rng([seed, QUADRATICS])
    eigen = rng.uniform(mu, smoothness, (num_devices, dimension))
    if dimension > 1:
        eigen[:, 0], eigen[:, -1] = mu, smoothness
    basis = np.linalg.qr(rng.normal(size=(num_devices, dimension, dimension)))[0]
    a = (basis * eigen[:, None, :]) @ basis.transpose(0, 2, 1)  # [n, d, d]
    b = rng.normal(size=dimension) + spread * rng.normal(size=(num_devices, dimension))
    first = np.arange(num_devices)
    return Federation(
        x=torch.from_numpy((a + a.transpose(0, 2, 1)) / 2),
        y=torch.from_numpy(b),
        bounds=torch.from_numpy(np.stack([first, first + 1, first + 1, first + 1], axis=1)),
        ids=first,
    )


def tridiagonal(num_devices: int = 24, p: int = 4, mu: float = 2e-4) -> Federation:
    """The strongly convex problem of multi-model federated learning (Bhuyan, Moharir, Joshi 2022, Eq. 4-9).

    F_k(w) = 1/2 (w' A_k w - 2 b_k' w) + mu/2 |w|^2 in N p + 1 dimensions, with one training sample per device:
    x = A_k + mu I, y = b_k, float64. A_k connects the coordinates (k-1) p + 1 .. k p + 1 in a chain; the first and the
    last device have its ends. The sum of all A_k is tridiagonal with -1, 2, -1. Only b_1 = e_1 is not zero.

    Raises:
        ValueError: an argument is out of range.
    """
    import torch

    if num_devices < 2 or p < 1:
        raise ValueError(f"tridiagonal needs at least 2 devices and p = 1; got {num_devices} and {p}")
    if not 0 < mu <= WIDEST:
        raise ValueError(f"strong convexity needs mu above 0 and up to {WIDEST:.0e}; got {mu}")
    size = num_devices * p + 1
    check_matrices(num_devices, size)
    chain = np.diag([1.0, *[2.0] * (p - 1), 1.0]) - np.eye(p + 1, k=1) - np.eye(p + 1, k=-1)
    a, b = np.zeros((num_devices, size, size)), np.zeros((num_devices, size))
    for k in range(num_devices):
        a[k, k * p : k * p + p + 1, k * p : k * p + p + 1] = chain  # B_k
    a[0, 0, 0] += 1
    a[-1, -1, -1] += 1
    b[0, 0] = 1
    first = np.arange(num_devices)
    return Federation(
        x=torch.from_numpy(a + mu * np.eye(size)),
        y=torch.from_numpy(b),
        bounds=torch.from_numpy(np.stack([first, first + 1, first + 1, first + 1], axis=1)),
        ids=first,
    )


def quadratic_clusters(
    num_devices: int, num_clusters: int, dimension: int, seed: int = 0, spread: float = 1.0
) -> Federation:
    """f_i(t) = a_i/2 |t - mu_k|^2 (up to a constant) for device i of cluster k (CoBo, Example 2), as `quadratics`.

    Clusters are consecutive devices, of about equal number. a_i is drawn from [0.5, 1], so that any two devices of a
    cluster are collaborative with M_ij <= 1/3, and mu_k from N(0, spread^2). x = a_i I, y = a_i mu_k.

    Raises:
        ValueError: an argument is out of range.
    """
    import torch

    if not 1 <= num_clusters <= num_devices or dimension < 1:
        raise ValueError(
            f"quadratic clusters need 1 dimension or more and at least as many devices as clusters; "
            f"got {num_clusters} clusters of {num_devices} devices in {dimension} dimensions"
        )
    check_spread(spread)
    check_matrices(num_devices, dimension)
    rng = np.random.default_rng([seed, QUADRATIC_CLUSTERS])
    first = np.arange(num_devices)
    cluster = first * num_clusters // num_devices
    a = rng.uniform(0.5, 1, (num_devices, 1))
    mu = spread * rng.normal(size=(num_clusters, dimension))
    return Federation(
        x=torch.from_numpy(a[..., None] * np.eye(dimension)),
        y=torch.from_numpy(a * mu[cluster]),
        bounds=torch.from_numpy(np.stack([first, first + 1, first + 1, first + 1], axis=1)),
        ids=first,
        cluster=cluster,
    )
