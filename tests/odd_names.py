"""A method whose rows have names that were trouble; in a module of its own, which worker processes import."""

from dataclasses import dataclass

from torch import Tensor

from polytier import Algorithm, Children, LocalProblem


@dataclass(frozen=True)
class OddNames(Algorithm):
    """Keeps, remembers and recalls under names that were trouble."""

    def server(self, state: Tensor, children: Children) -> Tensor:
        children.remember("own/x", children.call("solve", state))
        return children.recall("own/x", state[children.kids[1]]).mean()

    def team(self, x: Tensor, children: Children) -> Tensor:
        first = children.memory("a.b", 0 * x)
        children.keep(**{"a.b": first + 1, "_a": first + 2, "self": first, "名/..": first + 3})
        return children.solve(x).mean() + children.memory("_a", x)

    def device(self, x: Tensor, local: LocalProblem) -> Tensor:
        theta = local.memory("_model-", x)
        local.keep(**{"_model-": theta - 0.1 * local.grad(theta), "model": theta})
        return local.memory("_model-", x)
