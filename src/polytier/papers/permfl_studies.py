"""PerMFL's figures that vary one of its settings, as data.

Values that are stated in the text or in captions are the paper's. Values that are only visible in pictures are replaced
by a range around the stated settings; the notes of the study say so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Place = tuple[str, str]  # data, and "MCLR" or "network"


@dataclass(frozen=True)
class Series:
    """A chart in which one setting or field of PerMFL takes several values while the others are fixed.

    rising   | the models ("PM", "GM") that larger values make faster, according to the paper
    alike    | the models whose speed does not depend on the values, according to the paper
    falling  | the models that larger values make slower, according to the paper
    """

    place: Place
    key: str
    values: Sequence[float]
    fixed: Mapping[str, Any]
    panel: str
    rising: tuple[str, ...]
    alike: tuple[str, ...]
    falling: tuple[str, ...]


@dataclass(frozen=True)
class Study:
    """An item of the plan; `quick` are its charts at the scale "quick", and `less` states what is smaller there."""

    name: str
    title: str
    full: Sequence[Series]
    quick: Sequence[Series]
    less: str
    notes: tuple[str, ...]


def vary(
    key: str,
    values: Sequence[float],
    *places: Place,
    panel: str = "",
    rising: tuple[str, ...] = (),
    alike: tuple[str, ...] = (),
    falling: tuple[str, ...] = (),
    **fixed: Any,
) -> list[Series]:
    """The same chart for several data sets and models."""
    return [Series(place, key, values, fixed, panel, rising, alike, falling) for place in places]


MNIST, MNIST_CNN = ("MNIST", "MCLR"), ("MNIST", "network")
FMNIST, FMNIST_CNN = ("FMNIST", "MCLR"), ("FMNIST", "network")
EMNIST, EMNIST_CNN = ("EMNIST-10", "MCLR"), ("EMNIST-10", "network")
SYNTHETIC, SYNTHETIC_DNN = ("Synthetic", "MCLR"), ("Synthetic", "network")
SWEPT = (MNIST_CNN, MNIST, FMNIST_CNN, FMNIST, SYNTHETIC_DNN, SYNTHETIC)

BETA, GAMMA, LAMBDA = (0.1, 0.3, 0.6, 0.9), (0.5, 1.5, 3.0, 6.0), (0.1, 0.5, 1.5, 3.0)
AT_BETA = {"team_pull": 3.0, "device_pull": 0.5}
AT_GAMMA = {"device_pull": 1.5, "server_lr": 0.1}
AT_LAMBDA = {"server_lr": 0.3, "team_pull": 3.0}
TEAMS = (2, 4, 5)
OF_DEVICES, OF_DEVICES_FMNIST = (0.02, 0.04, 0.1, 0.3), (0.02, 0.04, 0.15, 0.3)
OF_TEAMS, OF_TEAMS_FEW = (0.2, 0.3, 0.4, 0.5), (0.02, 0.04, 0.1)
TEAM_ROUNDS, MORE_ROUNDS, MORE_ROUNDS_57 = (5, 10, 20, 30), (30, 100, 150, 200), (30, 50, 100, 150)
FEW = {"team_participation": 0.2, "device_participation": 0.02, "teams": 10}  # Figs. 57, 59
FEWER = {"team_participation": 0.02, "device_participation": 0.02, "teams": 10}  # Figs. 58, 60
# those that the scale "quick" uses
BETA_3, GAMMA_3, LAMBDA_3, OF_DEVICES_2, OF_TEAMS_2 = (
    (0.1, 0.3, 0.9),
    (0.5, 1.5, 6.0),
    (0.1, 0.5, 3.0),
    (0.1, 0.3),
    (0.2, 0.5),
)

PICTURED = "The values are only visible in the pictures; a range around the stated settings is used here."
AT = (
    "For beta, gamma = 3 and lambda = 0.5; for gamma, lambda = 1.5 and beta = 0.1; for lambda, beta = 0.3 and "
    "gamma = 3."
)
SWEEP = "All have eta = 0.03, alpha = 0.01 and 4 teams of 10 devices that all take part."
ALL = "There are 40 devices for any number of teams."
ROUNDED = "A share is at least one device: 2, 4 and 10 % of 10 devices are one device, so these curves are equal."
TEN = (
    "The number of teams is not stated; 10 teams of 4 devices are used, so that 20 to 50 % are whole numbers of teams."
)
ONE = "With 4 teams of 10 devices, 2 % (Fig. 4d) and 20 % (Figs. 49-51) of the teams are both one team per round."
ONLY = "MCLR on MNIST and synthetic data only"

PM, GM, BOTH = ("PM",), ("GM",), ("PM", "GM")


def beta(values: Sequence[float], *places: Place, **own: Any) -> list[Series]:
    """Charts that vary beta."""
    return vary("server_lr", values, *places, **AT_BETA, **own)


def gamma(values: Sequence[float], *places: Place, **own: Any) -> list[Series]:
    """Charts that vary gamma."""
    return vary("team_pull", values, *places, **AT_GAMMA, **own)


def lambda_(values: Sequence[float], *places: Place, **own: Any) -> list[Series]:
    """Charts that vary lambda."""
    return vary("device_pull", values, *places, **AT_LAMBDA, **own)


def devices(values: Sequence[float], *places: Place, **own: Any) -> list[Series]:
    """Charts that vary the share of devices that take part."""
    return vary("device_participation", values, *places, **own)


def teams(values: Sequence[float], *places: Place, **own: Any) -> list[Series]:
    """Charts that vary the share of teams that take part."""
    return vary("team_participation", values, *places, **{"teams": 10, **own})


def team_rounds(values: Sequence[float], *places: Place, **own: Any) -> list[Series]:
    """Charts that vary K."""
    return vary("team_rounds", values, *places, **own)


def who(of_devices: Sequence[float], of_teams: Sequence[float]) -> list[Series]:
    """The charts of Figure 4."""
    return [
        *vary("teams", TEAMS, MNIST, panel="a", alike=PM),
        *devices(of_devices, MNIST, panel="b", teams=5, rising=GM),
        *teams(of_teams, MNIST, panel="c", rising=BOTH),
        *teams((0.5, 1.0), MNIST, panel="c, a", alike=PM),
        *devices(of_devices, MNIST, panel="d", team_participation=0.2, rising=BOTH),
    ]


STUDIES = (
    Study(
        "figure3",
        "Effect of beta, gamma and lambda, MNIST",
        [
            s
            for place in (MNIST_CNN, MNIST)
            for s in (
                *beta(BETA, place, rising=PM),
                *gamma(GAMMA, place, rising=PM),
                *lambda_(LAMBDA, place, rising=PM),
            )
        ],
        [*beta(BETA_3, MNIST, rising=PM), *gamma(GAMMA_3, MNIST, rising=PM), *lambda_(LAMBDA_3, MNIST, rising=PM)],
        "3 values instead of 4, MCLR only",
        (SWEEP, AT, PICTURED),
    ),
    Study(
        "figure4",
        "Participation, MNIST, MCLR",
        who(OF_DEVICES, OF_TEAMS),
        who(OF_DEVICES_2, OF_TEAMS_2),
        "2 shares instead of 4",
        (ALL, ROUNDED, TEN, ONE),
    ),
    Study(
        "figures5-10",
        "Effect of beta",
        beta(BETA, *SWEPT, rising=BOTH),
        beta(BETA_3, MNIST, SYNTHETIC, rising=BOTH),
        f"3 values instead of 4, {ONLY}",
        (SWEEP, AT, PICTURED),
    ),
    Study(
        "figures11-16",
        "Effect of gamma",
        gamma(GAMMA, *SWEPT, rising=BOTH),
        gamma(GAMMA_3, MNIST, SYNTHETIC, rising=BOTH),
        f"3 values instead of 4, {ONLY}",
        (SWEEP, AT, PICTURED),
    ),
    Study(
        "figures17-22",
        "Effect of lambda",
        lambda_(LAMBDA, *SWEPT, rising=BOTH),
        lambda_(LAMBDA_3, MNIST, SYNTHETIC, rising=BOTH),
        f"3 values instead of 4, {ONLY}",
        (SWEEP, AT, PICTURED),
    ),
    Study(
        "figures23-30",
        "Number of teams, all take part",
        [
            *vary("teams", TEAMS, *SWEPT[:4], EMNIST_CNN, EMNIST, alike=PM),
            *vary("teams", TEAMS, SYNTHETIC_DNN, alike=PM, falling=GM),  # Fig. 29
            *vary("teams", TEAMS, SYNTHETIC, alike=PM),
        ],
        vary("teams", TEAMS, MNIST, SYNTHETIC, alike=PM),
        ONLY,
        (ALL,),
    ),
    Study(
        "figures31-42",
        "All teams, some of their devices (MCLR)",
        [
            s
            for place in (FMNIST, MNIST, SYNTHETIC, EMNIST)
            for n in TEAMS
            for s in devices(OF_DEVICES, place, teams=n, rising=GM)
        ],
        devices(OF_DEVICES_2, MNIST, teams=5, rising=GM),
        "2 shares instead of 4, 5 teams on MNIST only",
        (ALL, "The shares are those of Figs. 49-50.", ROUNDED),
    ),
    Study(
        "figures43-48",
        "Some teams, all their devices",
        [
            *teams(OF_TEAMS_FEW, EMNIST, rising=BOTH),
            *teams(OF_TEAMS, EMNIST_CNN, MNIST, MNIST_CNN, FMNIST, FMNIST_CNN, rising=BOTH),
        ],
        teams(OF_TEAMS_2, MNIST, rising=BOTH),
        "2 shares instead of 4, MCLR on MNIST only",
        (ALL, TEN),
    ),
    Study(
        "figures49-51",
        "A fifth of the teams, some of their devices (MCLR)",
        [
            *devices(OF_DEVICES, EMNIST, MNIST, team_participation=0.2, rising=BOTH),
            *devices(OF_DEVICES_FMNIST, FMNIST, team_participation=0.2, rising=BOTH),
        ],
        devices(OF_DEVICES_2, MNIST, team_participation=0.2, rising=BOTH),
        "2 shares instead of 4, MNIST only",
        (ALL, ROUNDED, ONE),
    ),
    Study(
        "figures52-56",
        "Team rounds K, all take part",
        team_rounds(TEAM_ROUNDS, MNIST_CNN, MNIST, FMNIST_CNN, SYNTHETIC_DNN, SYNTHETIC, rising=BOTH),
        team_rounds((5, 10, 20), MNIST, SYNTHETIC, rising=BOTH),
        f"3 values instead of 4, {ONLY}",
        (
            PICTURED,
            "According to the section's heading some of the devices take part, according to the captions "
            "all; here all do.",
        ),
    ),
    Study(
        "figures57-60",
        "Team rounds K, few teams and devices (MCLR)",
        [
            *team_rounds(MORE_ROUNDS_57, EMNIST, rising=GM, **FEW),
            *team_rounds(MORE_ROUNDS, EMNIST, alike=GM, **FEWER),
            *team_rounds(MORE_ROUNDS, MNIST, rising=GM, **FEW),
            *team_rounds(MORE_ROUNDS, MNIST, alike=GM, **FEWER),
        ],
        [*team_rounds((30, 150), MNIST, rising=GM, **FEW), *team_rounds((30, 150), MNIST, alike=GM, **FEWER)],
        "2 values instead of 4, MNIST only",
        (
            TEN + " 2 % are then one team and 20 % are two; 2 % of 4 devices are one device.",
            "Fig. 60 has the same caption as Fig. 58 (EMNIST); here it is on MNIST, like Fig. 59.",
        ),
    ),
)
