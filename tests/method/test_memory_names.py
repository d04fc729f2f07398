"""Rows may be kept under any name: in memory, in checkpoints, in files, and those of version 0.1 are read."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from odd_names import OddNames
from polytier import Federation, RunFolder, Topology, make_loop, train
from polytier.method.mapped_memory import MappedMemory
from polytier.method.memory import LONGEST, Memory, RowName, entries, name_of_0_1
from polytier.runs import callbacks, checkpoint
from polytier.runs.read_files import STORE

TREE = Topology.build(np.arange(6), np.arange(6) // 3)
ODD = ["a.b", "a/b", "../up", "_a", "_a-b", "", ".", "A", "a", "\u00e9", "e\u0301", "own", "a%2Fb", "\0"]
ODD += ["名" * LONGEST, "x" * LONGEST]
TEXTS = st.text(max_size=LONGEST) | st.sampled_from(ODD)
NAMES = st.builds(RowName, st.integers(0, 2), TEXTS, st.none() | TEXTS)


@given(NAMES)
@settings(max_examples=300, deadline=None)
def test_a_name_survives_a_checkpoint_and_a_path(name):
    assert RowName.parse(str(name)) == name
    assert str(name).isascii()
    folder = name.folder()
    assert RowName.of_folder(folder) == name
    assert not folder.is_absolute()
    assert all(len(part) <= 100 and not set(part) & set("./\\:") for part in folder.parts)


@given(NAMES, NAMES)
@settings(max_examples=300, deadline=None)
def test_names_do_not_collide(a, b):
    lower = [str(name.folder()).lower() for name in (a, b)]  # some systems do not tell A from a
    assert (a == b) == (str(a) == str(b)) == (lower[0] == lower[1])


@given(st.lists(NAMES, max_size=6, unique=True), st.sampled_from([None, Memory, MappedMemory]))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rows_of_any_names_survive_a_checkpoint_and_files(tmp_path_factory, names, kind):
    folder = tmp_path_factory.mktemp("rows")
    memory = Memory(TREE) if kind is None else kind(TREE, folder / "store")
    for k, (tier, name, field) in enumerate(names):
        memory.write(tier, name, torch.tensor([0]), torch.full((1, 2), float(k)), field)
    save_file({k: v.contiguous() for k, v in memory.state().items()}, folder / "rows.safetensors")
    loaded = Memory(TREE)
    loaded.load(load_file(folder / "rows.safetensors"))
    for again in (memory, loaded, *([] if kind is None else [kind(TREE, folder / "store")])):
        for k, (tier, name, field) in enumerate(names):
            found = again.read(tier, name, torch.tensor([0]), torch.full((1, 2), -1.0), field)
            assert found.tolist() == [[k, k]]
        for tier in range(3):
            assert again.names(tier) == sorted({n.name for n in names if n.tier == tier and n.field is None})


def test_a_name_that_is_too_long_is_refused_with_advice():
    memory, rows = Memory(TREE), torch.ones(1, 2)
    for name, field in (("x" * 101, None), ("x", "y" * 101)):
        for work in (memory.write, memory.read):
            with pytest.raises(ValueError, match=r"up to 100 characters; .* has 101: use a shorter name"):
                work(1, name, torch.tensor([0]), rows, field)
    with pytest.raises(ValueError, match="kept under a text; got 3"):
        memory.write(1, 3, torch.tensor([0]), rows)  # type: ignore[arg-type]


# -- a method with names of its own -----------------------------------------------------------------------


def make() -> Federation:
    rng = np.random.default_rng(1)
    device = np.repeat(np.arange(6), 8)
    return Federation.from_arrays(rng.normal(size=(48, 3)), rng.integers(0, 3, 48), device, team=device // 3)


@pytest.mark.parametrize("in_files", [False, True])
def test_a_run_with_any_names_goes_on_from_its_checkpoint(tmp_path, monkeypatch, in_files):
    if in_files:
        monkeypatch.setattr(callbacks, "IN_FILES", 0)
    whole = train(OddNames(), make(), "mclr", rounds=4, batch_size=4)
    train(OddNames(), make(), "mclr", rounds=2, batch_size=4, callbacks=[RunFolder(tmp_path / "run")])
    _, tensors, facts = checkpoint.latest(tmp_path / "run/checkpoints") or (0, {}, {})
    with make_loop(OddNames(), make(), "mclr", batch_size=4, workers=2, tile=2) as training:
        if in_files:
            training.keep_in(tmp_path / "run" / STORE)
        training.restore(tensors, facts)
        again = training.run(4)
        assert set(training.context.memory.names(1)) == {"a.b", "_a", "self", "名/.."}
    assert torch.equal(whole.row(), again.row())
    assert torch.equal(whole.personal, again.personal)  # type: ignore[arg-type]


# -- version 0.1 ------------------------------------------------------------------------------------------


def test_names_of_version_0_1_are_translated():
    assert name_of_0_1(2, "model") == RowName(2, "model")
    assert name_of_0_1(1, "_answer-") == RowName(1, "answer", "")
    assert name_of_0_1(1, "_learned-models") == RowName(1, "learned", "models")


def test_a_checkpoint_of_version_0_1_is_loaded():
    rows, kept = torch.arange(12.0).reshape(6, 2), torch.tensor([True, False] * 3)
    old = {"2.model.rows": rows, "2.model.kept": kept}
    old |= {"1._answer-.rows": rows[:2], "1._answer-.kept": kept[:2]}
    old |= {"1._learned-models.rows": rows[2:4], "1._learned-models.kept": kept[:2]}
    old |= {"2.a.b.rows": rows, "2.a.b.kept": kept}  # which 0.1 wrote and could not read
    memory, ids, default = Memory(TREE), torch.arange(2), torch.full((2, 2), -1.0)
    memory.load(old)
    assert memory.read(2, "model", ids, default).tolist() == [[0, 1], [-1, -1]]
    assert memory.read(2, "a.b", ids, default).tolist() == [[0, 1], [-1, -1]]
    assert memory.read(1, "answer", ids, default, "").tolist() == [[0, 1], [-1, -1]]
    assert memory.read(1, "learned", ids, default, "models").tolist() == [[4, 5], [-1, -1]]
    assert (memory.names(2), memory.names(1)) == (["a.b", "model"], [])
    assert len(list(entries(memory.state()))) == len(list(entries(old))) == 4


def test_files_of_version_0_1_are_taken_over(tmp_path):
    def old_file(name: str, values: np.ndarray) -> None:
        (tmp_path / name).write_bytes(values.tobytes())

    now = np.ones((6, 2), np.float32)
    for name, number in (("2.model", 6), ("1._answer-model", 2)):
        old_file(f"{name}.float32.2.rows", now[:number])
        old_file(f"{name}.float32.2.kept", np.ones(number, bool))
        old_file(f"{name}.float32.2.noted", np.full(number, 3))
    old_file("2.count.int64..rows", np.arange(6))
    old_file("2.count.int64..kept", np.ones(6, bool))
    old_file("2.count.int64..noted", np.full(6, 3))
    old_file("epoch", np.array([3]))
    memory = MappedMemory(TREE, tmp_path)
    memory.undo(3)
    ids, default = torch.arange(2), torch.zeros(2, 2)
    assert memory.read(2, "model", ids, default).tolist() == [[1, 1], [1, 1]]
    assert memory.read(1, "answer", ids, default, "model").tolist() == [[1, 1], [1, 1]]
    assert memory.read(2, "count", ids, torch.zeros(2)).tolist() == [0, 1]
    assert memory.names(2) == ["count", "model"]
    assert not [path for path in Path(tmp_path).iterdir() if path.is_file() and path.name != "epoch"]


def test_a_journal_of_version_0_1_is_not_unpickled(tmp_path):
    class Payload:
        def __reduce__(self):
            return Path.touch, (tmp_path / "it-ran",)

    data = pickle.dumps(Payload())
    (tmp_path / "journal-3-1").write_bytes(len(data).to_bytes(8, "little") + data)
    with pytest.raises(ValueError, match=r"a journal of version 0\.1; reading it could run code"):
        MappedMemory(TREE, tmp_path)
    assert not (tmp_path / "it-ran").exists()
