"""A classifier for scikit-learn with one model per group of samples."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.metrics import accuracy_score
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from polytier.data.federation import Federation, as_names
from polytier.method.algorithm import Algorithm
from polytier.runs.export import predictions
from polytier.runs.loop import train

FLOATS = (np.float64, np.float32)  # the types of inputs; others are converted to the first


class PersonalizedClassifier(ClassifierMixin, BaseEstimator):
    """A classifier that learns one model per group of samples (device), as scikit-learn's estimators are used.

    `predict` uses the personal model of each sample's group; if the method has none, the model of the group's team or
    the global model. A group that was not in `fit` is predicted by the model of its team if `teams` is given and known,
    otherwise by the global model. Without `groups`, all samples of `fit` belong to one group.

    Args:
        method: The method: a name such as "permfl", or an object such as `polytier.PerMFL(device_lr=0.1)`.
        model: A module, or the name of a built-in model such as "mclr" or "dnn:100".
        rounds: Number of rounds of the server.
        standardize: Whether inputs are scaled to mean 0 and standard deviation 1.
        random_state: Seed of every random draw: an integer, a `numpy.random.RandomState`, or None.
        settings: Other settings of `polytier.train` by name.

    Attributes:
        classes_: The classes, in the order of the columns of `predict_proba`.
        run_: The result of `polytier.train`.
        n_features_in_: Number of features.

    Examples:
        >>> import numpy as np, polytier
        >>> rng = np.random.default_rng(0)
        >>> X, person = rng.normal(size=(400, 4)), np.repeat(["anna", "bert", "chen", "dora"], 100)
        >>> y = np.where((X[:, 0] > 0) == np.isin(person, ["anna", "bert"]), "yes", "no")  # people differ
        >>> classifier = polytier.PersonalizedClassifier(polytier.PerMFL(device_lr=0.3), rounds=20)
        >>> classifier.fit(X, y, groups=person).score(X, y, groups=person) > 0.9
        True
        >>> classifier.predict(X[:1], groups=["anna"]).shape
        (1,)
    """

    def __init__(
        self,
        method: str | Algorithm = "permfl",
        model: str | nn.Module = "mclr",
        *,
        rounds: int = 50,
        standardize: bool = True,
        random_state: Any = 0,
        settings: dict[str, Any] | None = None,
    ) -> None:
        self.method = method
        self.model = model
        self.rounds = rounds
        self.standardize = standardize
        self.random_state = random_state
        self.settings = settings

    def fit(self, X: Any, y: Any, groups: Any = None, teams: Any = None) -> PersonalizedClassifier:
        """Train the models.

        Args:
            X: [N, features] inputs.
            y: [N] classes, of any type that scikit-learn takes.
            groups: [N] the group (device) of each sample, integers or strings; by default one group.
            teams: [N] the team of each sample's group; by default there are no teams.

        Returns:
            The classifier.

        Raises:
            ValueError: Arrays do not fit together, or a setting is not allowed.
        """
        X, y = validate_data(self, X, y, dtype=FLOATS)
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        federation = Federation.from_arrays(
            X,
            labels,
            device=np.zeros(len(labels), dtype=np.int64) if groups is None else groups,
            team=teams,
            shares=(1, 0, 0),
            num_classes=len(self.classes_),
        )
        given = self.random_state
        seed = int(given) if isinstance(given, int | np.integer) else check_random_state(given).randint(1 << 31)
        self.run_ = train(
            self.method,
            federation.standardized() if self.standardize else federation,
            self.model,
            rounds=self.rounds,
            seed=seed,
            **{"eval_every": self.rounds, **(self.settings or {})},
        )
        return self

    def predict_proba(self, X: Any, groups: Any = None, teams: Any = None) -> np.ndarray:
        """The probability of every class: the softmax of the outputs of each sample's model.

        Args:
            X: [N, features] inputs.
            groups: [N] the group of each sample; by default the only group of `fit`, or none of them.
            teams: [N] the team of each sample, for groups that were not in `fit`.

        Returns:
            [N, classes] the probabilities, in the order of `classes_`.

        Raises:
            ValueError: No model fits a sample's group; the message says what to give.
        """
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, dtype=FLOATS)
        scores = np.empty((len(X), len(self.classes_)))
        places: dict[tuple[str | None, str | None], list[int]] = {}
        for place, owner in enumerate(self._owners(len(X), groups, teams)):
            places.setdefault(owner, []).append(place)
        for owner, chosen in places.items():
            scores[chosen] = predictions(self.run_, self._row(*owner), X[chosen])[1]
        scores = np.exp(scores - scores.max(1, keepdims=True))
        return scores / scores.sum(1, keepdims=True)

    def predict(self, X: Any, groups: Any = None, teams: Any = None) -> np.ndarray:
        """The class of every sample.

        Args:
            X: [N, features] inputs.
            groups: [N] the group of each sample, as in `predict_proba`.
            teams: [N] the team of each sample, as in `predict_proba`.

        Returns:
            [N] the classes.

        Raises:
            ValueError: As in `predict_proba`.
        """
        probabilities = self.predict_proba(X, groups, teams)
        return self.classes_[probabilities.argmax(1)]

    def score(self, X: Any, y: Any, groups: Any = None, teams: Any = None, sample_weight: Any = None) -> float:
        """The accuracy of `predict`.

        Args:
            X: [N, features] inputs.
            y: [N] the true classes.
            groups: [N] the group of each sample, as in `predict_proba`.
            teams: [N] the team of each sample, as in `predict_proba`.
            sample_weight: [N] the weight of each sample; by default all are equal.

        Returns:
            The share of samples whose class is predicted.
        """
        return float(accuracy_score(y, self.predict(X, groups, teams), sample_weight=sample_weight))

    def _owners(self, number: int, groups: Any, teams: Any) -> list[tuple[str | None, str | None]]:
        """The group and the team of each sample as texts; None if they are not given."""
        only = [str(self.run_.device_ids[0])] if len(self.run_.device_ids) == 1 else [None]
        found = [only * number if groups is None else as_names(groups, "groups").astype(str).tolist()]
        found.append([None] * number if teams is None else as_names(teams, "teams").astype(str).tolist())
        for name, values in zip(("groups", "teams"), found, strict=True):
            if len(values) != number:
                raise ValueError(f"{name} has {len(values)} values for {number} samples; give one per sample")
        return list(zip(*found, strict=True))

    def _row(self, group: str | None, team: str | None) -> Tensor:
        """The parameters of the model for a group of a team."""
        run, teams = self.run_, self.run_.context.population.team
        where = np.flatnonzero(run.device_ids.astype(str) == group)
        if len(where) and run.personal is not None:
            return run.whole_row(device=group)
        if len(where) and teams is not None:
            team = str(teams[where[0]])
        if run.team is not None and team is not None and team in run.team_ids.astype(str):
            return run.whole_row(team=team)
        if run.global_ is not None:
            return run.global_
        method = type(run.algorithm).__name__
        if group is None:
            raise ValueError(f"groups= is missing, and {method} has no global model; give the group of each sample")
        raise ValueError(
            f"the group {group!r} was not in fit, and {method} has no global model; use run_.adapt for a new group"
        )
