"""Which parameters train: texts, names, advice, and that the user's module is left as it was."""

import copy

import pytest
import torch
from torch import Tensor, nn

from polytier.models.trainable import Trainable, digest
from polytier.models.zoo import make_model


def two_layers() -> nn.Module:
    return make_model("dnn:5", (4,), 3, seed=0)


class Tied(nn.Module):
    """An embedding whose table is the last layer too."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4)
        self.mix = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.table(x)))).mean(1)


@pytest.mark.parametrize("text", ["all", "head", "layers=head.*", "layers=head.*+*.bias"])
def test_a_text_is_read_and_written(text):
    assert str(Trainable.parse(text)) == text
    assert Trainable.parse(Trainable.parse(text)) == Trainable.parse(text)


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("heads", "did you mean 'head'.*layers=PATTERN"),
        ("", "available: all, head, layers=PATTERN"),
        ("layers", "layers=PATTERN"),
        ("layers=", "joined by"),
        ("layers=a++b", "joined by"),
        ("head=x", "all, head, layers=PATTERN or lora"),
        (3, "a text such as 'head'"),
    ],
)
def test_a_text_that_is_no_choice_brings_advice(text, advice):
    with pytest.raises(ValueError, match=advice):
        Trainable.parse(text)


def test_names_follow_the_module():
    names = [name for name, _ in two_layers().named_parameters()]
    assert Trainable().names(two_layers()) == names
    assert Trainable.parse("head").names(two_layers()) == ["head.weight", "head.bias"]
    assert Trainable.parse("layers=head.*+body.*").names(two_layers()) == names  # in the module's order
    assert Trainable.parse("layers=*.bias").names(two_layers()) == ["body.1.bias", "head.bias"]


def test_without_a_head_the_last_module_with_parameters_is_it():
    module = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 3), nn.ReLU()), nn.Flatten())
    assert Trainable.parse("head").names(module) == ["1.0.weight", "1.0.bias"]
    module.head = nn.Identity()
    assert Trainable.parse("head").names(module) == ["1.0.weight", "1.0.bias"]


def test_a_parameter_of_two_names_is_known_by_both():
    assert Trainable.parse("head").names(Tied()) == ["table.weight"]
    assert Trainable.parse("layers=head.*").names(Tied()) == ["table.weight"]
    assert Trainable.parse("layers=mix.*").names(Tied()) == ["mix.weight", "mix.bias"]


def test_the_users_module_is_left_as_it_was():
    module = two_layers()
    before = copy.deepcopy(module.state_dict())
    frozen = Trainable.parse("head").apply(module)
    assert all(p.requires_grad for p in module.parameters())
    assert [n for n, p in frozen.named_parameters() if p.requires_grad] == ["head.weight", "head.bias"]
    for p in frozen.parameters():
        p.data.zero_()
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_what_the_module_has_frozen_is_never_trained():
    module = two_layers()
    module.get_submodule("body").requires_grad_(False)
    assert Trainable().names(module) == ["head.weight", "head.bias"]
    assert Trainable.parse("layers=*.bias").names(module) == ["head.bias"]


def test_patterns_that_match_or_train_nothing_bring_advice():
    with pytest.raises(ValueError, match=r"'hed\.\*'.*body\.1\.weight, body\.1\.bias, head\.weight"):
        Trainable.parse("layers=head.*+hed.*").names(two_layers())
    module = two_layers()
    module.get_submodule("body").requires_grad_(False)
    with pytest.raises(ValueError, match=r"nothing would train: body\.1\.weight.*requires_grad_\(True\)"):
        Trainable.parse("layers=body.*").apply(module)
    with pytest.raises(ValueError, match="nothing would train"):
        Trainable().apply(two_layers().requires_grad_(False))
    with pytest.raises(ValueError, match="no parameters to train"):
        Trainable.parse("head").apply(nn.ReLU())
    many = nn.ModuleList(nn.Linear(1, 1) for _ in range(20))
    with pytest.raises(ValueError, match="and 28 more"):
        Trainable.parse("layers=x").names(many)


def test_a_digest_tells_every_difference():
    values = {"a": torch.arange(3.0), "b": torch.zeros(())}
    assert digest(values) == digest({k: values[k].clone() for k in ("b", "a")})
    others = [
        {"a": torch.arange(3.0), "b": -torch.zeros(())},
        {"a": torch.arange(3.0).double(), "b": torch.zeros(())},
        {"a": torch.arange(3.0).reshape(3, 1), "b": torch.zeros(())},
        {"a": torch.arange(3.0), "c": torch.zeros(())},
        {},
    ]
    assert len({digest(values), *map(digest, others)}) == 1 + len(others)
