"""Methods with few steps: their defaults are long."""

from typing import Any

from polytier import ALGORITHMS, Algorithm

SHORT = {
    "device_steps": 2,
    "team_rounds": 2,
    "local_rounds": 2,
    "tune_steps": 2,
    "personal_steps": 2,
    "head_steps": 2,
    "body_steps": 2,
    "steps": 4,
    "num_clusters": 2,
}


def short(name: str) -> Algorithm:
    kind: Any = ALGORITHMS[name]
    return kind(**{k: v for k, v in SHORT.items() if k in kind.__dataclass_fields__})
