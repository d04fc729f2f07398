"""Downloads against a server on this machine that knows ranges."""

from __future__ import annotations

import hashlib
import io
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from polytier.data import download
from polytier.data.download import DOWNLOADS, Download, get
from polytier.data.sources import SOURCES

CONTENT = bytes(range(256)) * 3000


def md5(content: bytes) -> str:
    return "md5:" + hashlib.md5(content).hexdigest()


class Server(ThreadingHTTPServer):
    files: dict[str, bytes]
    ranges = True
    stop_after: int | None = None
    asked: list[str | None]


class Handler(BaseHTTPRequestHandler):
    server: Server  # type: ignore[assignment]

    def do_GET(self) -> None:
        content = self.server.files.get(self.path.strip("/"))
        span = self.headers["Range"]
        self.server.asked.append(span)
        if content is None:
            self.send_error(404)
            return
        start = int(span.removeprefix("bytes=").rstrip("-")) if span and self.server.ranges else 0
        if span and start >= len(content):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        self.wfile.write(content[start:][: self.server.stop_after])

    def log_message(self, format: str, *args) -> None:
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    with Server(("127.0.0.1", 0), Handler) as running:
        running.files, running.asked = {"toy.bin": CONTENT}, []
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        address = f"http://127.0.0.1:{running.server_port}"
        monkeypatch.setitem(DOWNLOADS, "toy", (Download(f"{address}/toy.bin", md5(CONTENT)),))
        yield running
        running.shutdown()
        thread.join()


def test_get_shows_progress_and_leaves_no_part(server, tmp_path):
    seen: list[tuple[int, int | None]] = []
    folder = get("toy", tmp_path, lambda done, total: seen.append((done, total)))
    assert folder == tmp_path / "toy"
    assert (folder / "toy.bin").read_bytes() == CONTENT
    assert [path.name for path in folder.iterdir()] == ["toy.bin"]
    assert seen[0] == (0, len(CONTENT))
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert sorted(seen) == seen
    get("toy", tmp_path)
    assert server.asked == [None]  # what is there is not fetched again


def test_a_broken_download_goes_on_where_it_stopped(server, tmp_path):
    server.stop_after = 300_000
    with pytest.raises(ValueError, match="toy.bin.*[Tt]ry again"):
        get("toy", tmp_path)
    part = tmp_path / "toy" / "toy.bin.part"
    assert part.read_bytes() == CONTENT[:300_000]
    server.stop_after = None
    seen = []
    get("toy", tmp_path, lambda done, total: seen.append((done, total)))
    assert server.asked == [None, "bytes=300000-"]
    assert seen[0] == (300_000, len(CONTENT))
    assert (tmp_path / "toy" / "toy.bin").read_bytes() == CONTENT


@pytest.mark.parametrize("have", [100, len(CONTENT), len(CONTENT) + 5])
@pytest.mark.parametrize("ranges", [True, False])
def test_parts_of_any_length(server, tmp_path, have, ranges):
    server.ranges = ranges
    part = tmp_path / "toy" / "toy.bin.part"
    part.parent.mkdir()
    part.write_bytes((CONTENT + b"extra")[:have])
    if ranges and have > len(CONTENT):
        with pytest.raises(ValueError, match="it was removed"):
            get("toy", tmp_path)
        assert not part.exists()
    assert (get("toy", tmp_path) / "toy.bin").read_bytes() == CONTENT


def test_a_wrong_digest_is_not_put_in_place(server, tmp_path):
    server.files["toy.bin"] = CONTENT[:-1] + b"!"
    with pytest.raises(ValueError, match="published is md5:.*removed"):
        get("toy", tmp_path)
    assert list((tmp_path / "toy").iterdir()) == []


def test_sha256_is_known_too(server, tmp_path, monkeypatch):
    item = Download(DOWNLOADS["toy"][0].url, "sha256:" + hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setitem(DOWNLOADS, "toy", (item,))
    assert (get("toy", tmp_path) / "toy.bin").exists()


def test_zip_is_unpacked(server, tmp_path, monkeypatch):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in ("gzip/a.gz", "gzip/b.gz", "../c.gz"):
            archive.writestr(name, name.encode())
    server.files["gzip.zip"] = buffer.getvalue()
    url = f"http://127.0.0.1:{server.server_port}/gzip.zip"
    item = Download(url, md5(buffer.getvalue()), ("a.gz", "b.gz"))
    monkeypatch.setitem(DOWNLOADS, "emnist-toy", (item,))
    folder = get("emnist-toy", tmp_path)
    assert folder == tmp_path / "emnist"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        "a.gz": b"gzip/a.gz",
        "b.gz": b"gzip/b.gz",
    }
    get("emnist-toy", tmp_path)
    assert len(server.asked) == 1
    monkeypatch.setitem(DOWNLOADS, "emnist-toy", (Download(url, item.digest, ("z.gz",)),))
    with pytest.raises(ValueError, match="gzip.zip cannot be read as a zip archive: KeyError 'z.gz'"):
        get("emnist-toy", tmp_path)


def test_no_network_says_what_to_put_where(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setitem(DOWNLOADS, "toy", (Download("http://127.0.0.1:9/toy.bin", md5(b"")),))
    with pytest.raises(ValueError, match="put toy.bin into .*toy yourself"):
        get("toy", tmp_path)


def test_missing_on_the_server(server, tmp_path):
    server.files.clear()
    with pytest.raises(ValueError, match="404.*put toy.bin into"):
        get("toy", tmp_path)


def test_default_folder(server, tmp_path, monkeypatch):
    monkeypatch.setenv("POLYTIER_DATA", str(tmp_path))
    assert get("toy") == tmp_path / "toy"


def test_every_source_can_be_got_or_says_how(tmp_path):
    assert set(DOWNLOADS) | set(download.BY_HAND) == set(SOURCES)
    for name, words in {"digits": "nothing to get", "celeba": "img_align_celeba", "leaf": "json"}.items():
        with pytest.raises(ValueError, match=words):
            get(name, tmp_path)
    with pytest.raises(ValueError, match="no data 'minst'; available: mnist"):
        get("minst", tmp_path)
    for items in DOWNLOADS.values():
        for item in items:
            kind, digest = item.digest.split(":")
            assert (kind, len(digest)) == ("md5", 32)
            assert item.url.startswith("http")
