"""Files are complete or absent, links are not followed, and every flipped bit of a sealed document is found."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polytier.files.read import Damaged, digest_of, open_regular, read_bytes, read_json, read_line, refuse_links
from polytier.files.write import Appended, atomic, json_line, next_folder, write_bytes, write_json, write_text

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(min_size=1).filter(lambda k: k not in ("sha256", "format")), VALUES, max_size=4)


@given(OBJECTS)
@settings(max_examples=100, deadline=None)
def test_a_sealed_document_comes_back(tmp_path_factory, value):
    path = tmp_path_factory.mktemp("sealed") / "a.json"
    write_json(path, {"format": 3, **value})
    assert read_json(path) == {"format": 3, **value}
    assert json.loads(path.read_text())["format"] == 3  # for programs that know nothing of digests


def test_every_flipped_bit_of_a_sealed_document_is_found(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"format": 3, "state": "done", "round": 12, "loss": 0.25, "names": ["a", "ü"]})
    whole = path.read_bytes()
    for place in range(len(whole)):
        for bit in range(8):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])
            with pytest.raises(Damaged, match=r"a\.json"):
                read_json(path)
    for length in range(len(whole) - 1):  # the last byte is the end of the line
        path.write_bytes(whole[:length])
        with pytest.raises(Damaged):
            read_json(path)


def test_every_flipped_bit_of_a_line_is_found():
    line = json_line({"round": 3, "bytes": {"server-team": {"down": 5}}, "loss": 0.5}).rstrip("\n")
    assert read_line(line, checked=True) == {"round": 3, "bytes": {"server-team": {"down": 5}}, "loss": 0.5}
    whole = line.encode()
    for place in range(len(whole)):
        for bit in range(8):
            bad = whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :]
            with pytest.raises(Damaged):
                read_line(bad.decode("utf-8", "surrogateescape"), checked=True)


@pytest.mark.parametrize("text", ["", "null", "[]", "1", "{", '{"format": 3}', '{"format": "x"}', "[" * 100_000])
def test_what_is_no_document_is_refused(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(Damaged, match=r"a\.json"):
        read_json(tmp_path / "a.json")


def test_documents_of_earlier_formats_have_no_digest(tmp_path):
    (tmp_path / "a.json").write_text('{"rounds": 3, "format": 2}')
    assert read_json(tmp_path / "a.json") == {"rounds": 3, "format": 2}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with names")
def test_a_pipe_is_refused_instead_of_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for read in (open_regular, read_bytes, digest_of, read_json):
        with pytest.raises(Damaged, match="not a regular file"):
            read(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe is not a regular file"):
        refuse_links(tmp_path)


def test_a_link_is_replaced_and_its_target_stays(tmp_path):
    (tmp_path / "mine").write_text("mine")
    for write in (
        lambda p: write_text(p, "new"),
        lambda p: write_bytes(p, [b"new"]),
        lambda p: write_json(p, {"a": 1}),
    ):
        (tmp_path / "link").unlink(missing_ok=True)
        (tmp_path / "link").symlink_to(tmp_path / "mine")
        write(tmp_path / "link")
        assert not (tmp_path / "link").is_symlink()
        assert (tmp_path / "mine").read_text() == "mine"


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path):
    (tmp_path / "a").write_text("old")

    def pieces():
        yield b"half"
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        write_bytes(tmp_path / "a", pieces())
    with pytest.raises(TypeError), atomic(tmp_path / "a") as partial:
        partial.write_text(b"half")  # type: ignore[arg-type]
    assert (tmp_path / "a").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_changed_file_is_noticed_before_a_line_is_appended(tmp_path):
    lines = Appended(tmp_path / "a", "one\n")
    lines.append("two\n")
    assert lines.intact
    assert (tmp_path / "a").read_text() == "one\ntwo\n"
    os.truncate(tmp_path / "a", 3)
    assert not lines.intact
    (tmp_path / "a").unlink()
    assert not lines.intact
    (tmp_path / "a").write_text("one\ntwo\n")  # the same size, another file
    assert not lines.intact
    lines.close()


def test_a_folder_that_exists_is_never_taken(tmp_path):
    Path(tmp_path / "runs" / "a-2").mkdir(parents=True)
    assert [next_folder(tmp_path / "runs", "a").name for _ in range(3)] == ["a-1", "a-3", "a-4"]
