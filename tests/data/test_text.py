"""Text: files to devices, documents to splits, tokens to samples; tokenizers; advice."""

import gzip
import lzma

import numpy as np
import pytest
import torch

from gguf_files import small_llama, write_gguf
from polytier import Federation, build_federation
from polytier.data import IGNORED
from polytier.data.download import get
from polytier.data.sources import SOURCES
from polytier.data.sources.sentences import FILE
from polytier.data.sources.text import pack, text
from polytier.data.tokens import END, make_tokenizer
from polytier.runs.make_data import make_federation
from polytier.runs.spec import RunSpec

LINES = [f"line {k} says {'so ' * (k % 5)}much" for k in range(40)]


@pytest.fixture
def folder(tmp_path):
    home = tmp_path / "texts"
    home.mkdir()
    for name, lines in (("anna", LINES), ("bert", LINES[:25])):
        (home / f"{name}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return home


def documents_of(federation, device, split, tokenizer):
    """The documents of a split, back from the samples."""
    _, y = federation.device(federation.ids.tolist().index(device), split)
    stream = y[y != IGNORED].tolist()
    assert stream[-1] == tokenizer.end
    text = [[]]
    for token in stream:
        text.append([]) if token == tokenizer.end else text[-1].append(token)
    return [tokenizer.decode(each) for each in text[:-1]]


@pytest.mark.parametrize("context", [1, 7, 64, 1000])
def test_every_token_is_a_target_once_and_follows_its_input(context):
    documents = [np.arange(n) % 5 for n in (3, 1, 11, 20)]
    x, y = pack(documents, context, end=9)
    targets = y[y != IGNORED]
    assert targets.tolist() == [token for each in documents for token in (*each.tolist(), 9)]
    assert x.shape == y.shape == (-(-len(targets) // context), context)
    flat = x.reshape(-1)[: len(targets)]
    assert flat[0] == 9
    assert flat[1:].tolist() == targets[:-1].tolist()
    assert (x.reshape(-1)[len(targets) :] == 9).all()
    assert (y.reshape(-1)[len(targets) :] == IGNORED).all()


def test_a_file_is_a_device_and_no_document_is_in_two_splits(folder):
    federation = build_federation(f"text:{folder},context=16", split=(3, 1, 1))
    assert federation.ids.tolist() == ["anna", "bert"]
    assert federation.x.dtype == federation.y.dtype == torch.int64
    assert federation.is_tokens
    assert federation.num_classes == 257
    tokenizer = make_tokenizer("bytes")
    found = {s: documents_of(federation, "anna", s, tokenizer) for s in ("train", "validation", "test")}
    assert {split: len(each) for split, each in found.items()} == {"train": 24, "validation": 8, "test": 8}
    assert sorted(line for each in found.values() for line in each) == sorted(LINES)


def test_another_seed_splits_otherwise_and_the_same_one_alike(folder):
    first, same, other = (build_federation(f"text:{folder}", seed=seed).fingerprint for seed in (0, 0, 1))
    assert first == same != other


def test_a_folder_is_a_team(tmp_path):
    for team, names in (("north", ("a", "b")), ("south", ("a",))):
        (tmp_path / team).mkdir()
        for name in names:
            (tmp_path / team / f"{name}.txt").write_text("\n".join(LINES), encoding="utf-8")
    federation = build_federation(f"text:{tmp_path}")
    assert federation.ids.tolist() == ["north/a", "north/b", "south/a"]
    assert federation.team is not None
    assert federation.team.tolist() == ["north", "north", "south"]


def test_parts_of_a_file_share_its_documents_and_are_a_team(folder):
    federation = build_federation(f"text:{folder},parts=2,files=anna", split=(1, 0, 0))
    assert federation.ids.tolist() == ["anna-1", "anna-2"]
    assert federation.team is not None
    assert federation.team.tolist() == ["anna", "anna"]
    tokenizer = make_tokenizer("bytes")
    halves = [documents_of(federation, name, "train", tokenizer) for name in ("anna-1", "anna-2")]
    assert [len(half) for half in halves] == [20, 20]
    assert sorted(halves[0] + halves[1]) == sorted(LINES)


def test_tokens_limits_each_device_and_other_files_change_nothing(folder):
    both = build_federation(f"text:{folder},tokens=200,context=8", split=(1, 0, 0))
    alone = build_federation(f"text:{folder},tokens=200,context=8,files=bert", split=(1, 0, 0))
    assert torch.equal(both.device(1)[1], alone.device(0)[1])
    for k in range(2):
        y = both.device(k)[1]
        letters = int(((y != IGNORED) & (y != 256)).sum())
        assert 200 - max(map(len, LINES)) < letters <= 200


@pytest.mark.parametrize(("ending", "pack_up"), [(".gz", gzip.compress), (".xz", lzma.compress)])
def test_packed_files_read_alike(folder, ending, pack_up):
    plain = build_federation(f"text:{folder}").fingerprint
    for path in list(folder.iterdir()):
        (folder / f"{path.name}{ending}").write_bytes(pack_up(path.read_bytes()))
        path.unlink()
    assert build_federation(f"text:{folder}").fingerprint == plain


def test_blank_lines_separate_documents_of_several_lines(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\n\n\nthree\n\nfour\n", encoding="utf-8")
    federation = build_federation(f"text:{tmp_path}", split=(1, 0, 0), teams=0)
    found = documents_of(federation, "a", "train", make_tokenizer("bytes"))
    assert sorted(found) == ["four", "one\ntwo", "three"]


def test_pairs_of_bytes_are_trained_saved_and_read_alike(folder, tmp_path):
    trained = make_tokenizer("bpe:300", LINES)
    assert 257 < trained.size <= 300
    (ids,) = trained.encode(["line 3 says né"])
    assert trained.decode(ids) == "line 3 says né"
    assert len(ids) < len("line 3 says né".encode())
    trained.inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "parts").mkdir()
    trained.inner.model.save(str(tmp_path / "parts"))  # vocab.json and merges.txt
    for path in (tmp_path / "tokenizer.json", tmp_path, tmp_path / "parts"):
        again = make_tokenizer(str(path))
        assert (again.size, again.end) == (trained.size, trained.end)
        assert again.encode(["line 3 says né"])[0].tolist() == ids.tolist()
    assert make_tokenizer(str(tmp_path)).digest == trained.digest != make_tokenizer("bpe:290", LINES).digest
    federation = build_federation(f"text:{folder},tokenizer={tmp_path}")
    assert federation.num_classes == trained.size


def test_the_setting_of_a_run_reads_the_same_text_and_refuses_another_tokenizer(folder, tmp_path, monkeypatch):
    make_tokenizer("bpe:280", LINES).inner.save(str(tmp_path / "tokenizer.json"))
    monkeypatch.chdir(tmp_path)
    spec = RunSpec(data="text:texts,context=16,tokenizer=tokenizer.json", split="2:1:1")
    first, resolved = make_federation(spec)
    monkeypatch.chdir(folder)
    again, same = make_federation(resolved)
    assert first.fingerprint == again.fingerprint
    assert same.data == resolved.data
    assert str(tmp_path / "tokenizer.json") in resolved.data
    make_tokenizer("bpe:270", LINES).inner.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="it is not the one of the first run; give that one"):
        make_federation(resolved)


def test_the_folder_is_found_below_the_data_folder(folder):
    by_dir = build_federation("text:texts,context=16", data_dir=folder.parent)
    assert by_dir.fingerprint == build_federation(f"text:{folder},context=16").fingerprint
    folder.rename(folder.parent / "text")
    assert by_dir.fingerprint == build_federation("text:context=16", data_dir=folder.parent).fingerprint


def test_sentences_are_four_languages_two_devices_each():
    assert FILE.stat().st_size < 200_000
    federation = build_federation("sentences")
    assert federation.ids.tolist() == ["ca-1", "ca-2", "de-1", "de-2", "es-1", "es-2", "nl-1", "nl-2"]
    assert federation.team is not None
    assert federation.team.tolist() == ["ca", "ca", "de", "de", "es", "es", "nl", "nl"]
    tokenizer = make_tokenizer("bytes")
    found = [documents_of(federation, name, s, tokenizer) for name in federation.ids for s in ("train", "test")]
    assert len({line for each in found for line in each}) == 2400
    assert len(build_federation("sentences", devices=4)) == 4
    with pytest.raises(ValueError, match="4 languages of 3 devices"):
        build_federation("sentences", devices=3)


@pytest.mark.parametrize(
    ("change", "data", "advice"),
    [
        ({"cleo.txt": "\n \n"}, "", "cleo.txt is empty; put text there, or remove the file"),
        ({"cleo.txt": b"\xff\xfe\x00"}, "", "cleo.txt cannot be read as UTF-8 text"),
        ({"cleo.txt.xz": b"no xz"}, "", "cleo.txt.xz cannot be read as UTF-8 text"),
        ({"cleo.txt": "only one\n"}, "", "device cleo has 1 documents, too few for test samples"),
        ({"anna.txt.gz": gzip.compress(b"a\nb\n")}, "", "has anna twice, packed and not"),
        ({"more/dora.txt": "a\nb\n"}, "", "put all files into folders, which are teams, or none"),
        ({}, ",files=anna+brt", "no text file 'brt'"),
        ({}, ",context=0", "context must be 1 or more tokens; got 0"),
        ({}, ",parts=0", "parts of text must be 1 or more; got 0"),
        ({}, ",tokenizer=words", "there is no tokenizer 'words'; allowed: bytes, bpe:SIZE"),
        ({}, ",tokenizer=bpe:12", "the number of tokens is 257 or more, as in bpe:1000"),
        ({}, ",tokenizer=bpe:many", "the number of tokens is 257 or more, as in bpe:1000"),
        ({}, ",tokenizer={home}/anna.txt", "anna.txt cannot be read as a tokenizer"),
        ({}, ",tokenizer={home}", "it has neither tokenizer.json nor vocab.json and merges.txt"),
    ],
)
def test_advice(folder, change, data, advice):
    for name, content in change.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError) as error:
        build_federation(f"text:{folder}{data.format(home=folder)}")
    assert advice in str(error.value)


def test_advice_on_folders_and_partitions(folder, tmp_path):
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ValueError, match="has no text files; put one NAME.txt"):
        build_federation(f"text:{tmp_path / 'nothing'}")
    with pytest.raises(ValueError, match="there is no folder .*write --data text:FOLDER"):
        build_federation(f"text:{tmp_path / 'nowhere'}")
    with pytest.raises(ValueError, match="text names its own devices"):
        build_federation(f"text:{folder}", partition="labels:2")
    (tmp_path / "a, b").mkdir()
    folder = folder.rename(tmp_path / "a, b" / "texts")
    with pytest.raises(ValueError, match="has a comma in its path"):
        text(folder=str(folder))
    with pytest.raises(ValueError, match="put one NAME.txt per device into"):
        get("text", tmp_path)


def test_a_tokenizer_without_an_end_token_is_refused(tmp_path):
    tokenizer = make_tokenizer("bpe:280", LINES)
    content = tokenizer.inner.to_str().replace(END, "[UNK]")
    (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match="has no end token, which separates documents; add one of"):
        make_tokenizer(str(tmp_path / "tokenizer.json"))


def test_the_tokenizer_of_a_gguf_file_gives_the_ids_it_was_written_with(tmp_path):
    tokenizer = make_tokenizer("bpe:280", LINES)
    write_gguf(tmp_path / "model.gguf", small_llama(tokenizer.size), tokenizer.inner)
    again = make_tokenizer(str(tmp_path / "model.gguf"))
    assert (again.size, again.end) == (tokenizer.size, tokenizer.end)
    for one, other in zip(tokenizer.encode(LINES), again.encode(LINES), strict=True):
        assert one.tolist() == other.tolist()
    assert again.decode(again.encode(["né much"])[0]) == "né much"
    (tmp_path / "broken.gguf").write_bytes(b"no model")
    with pytest.raises(ValueError, match=r"broken.gguf cannot be read as a tokenizer: .*; give a tokenizer.json"):
        make_tokenizer(str(tmp_path / "broken.gguf"))


def test_tokens_of_ones_own_arrays_count_inputs_as_well(tmp_path):
    x = np.array([[1, 2, 9], [3, 4, 5]] * 4)
    y = np.array([[2, 3, IGNORED], [4, 5, 6]] * 4)
    federation = Federation.from_arrays(x, y, device=np.arange(8) % 2)
    assert federation.is_tokens
    assert federation.num_classes == 10
    np.savez(tmp_path / "own.npz", x=x, y=y, device=np.arange(8) % 2)
    assert build_federation(tmp_path / "own.npz").num_classes == 10
    with pytest.raises(ValueError, match="labels must be 0, 1, 2, .* got -1"):
        Federation.from_arrays(x, np.where(y == IGNORED, -1, y), device=np.arange(8) % 2)
    with pytest.raises(ValueError, match="token ids must be 0, 1, 2, .* got -7"):
        Federation.from_arrays(x - 8, y, device=np.arange(8) % 2)


def test_text_is_listed():
    assert {"text", "sentences"} <= set(SOURCES)
