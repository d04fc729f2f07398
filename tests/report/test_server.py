"""`polytier watch` answers this machine's browser only, and says what the page may do."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from polytier.report.server import HOST, make_server

NAMES = ("127.0.0.1", "localhost", "[::1]")


@pytest.fixture
def port(tmp_path) -> Iterator[int]:
    with make_server(tmp_path / "secret", 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def ask(port: int, *lines: str, first: str = "GET / HTTP/1.1") -> tuple[int, dict[str, str], str]:
    """The code, the headers and the body of the answer to exactly these lines."""
    with socket.create_connection((HOST, port), 10) as line:
        line.sendall("\r\n".join([first, *lines, "", ""]).encode())
        answer = b"".join(iter(lambda: line.recv(1 << 16), b""))
    head, _, body = answer.decode().partition("\r\n\r\n")
    status, *headers = head.split("\r\n")
    return int(status.split()[1]), dict(each.lower().split(": ", 1) for each in headers), body


@pytest.mark.parametrize("name", [*NAMES, "LOCALHOST"])
def test_this_machine_is_answered(port, name):
    code, _, body = ask(port, f"Host: {name}:{port}")
    assert code == 200
    assert "secret" in body
    assert ask(port, f"Host: {name}:{port}", f"Origin: http://{name}:{port}")[0] == 200
    assert ask(port, f"Host: {name}:{port}", first="GET /version HTTP/1.1")[0] == 200


@pytest.mark.parametrize(
    "hosts",
    [
        ["evil.example"],
        ["evil.example:{port}"],
        ["localhost"],  # another port
        ["localhost:1"],
        ["localhost:{port}.evil.example"],
        ["127.0.0.1.evil.example:{port}"],
        ["127.0.0.2:{port}"],
        ["0.0.0.0:{port}"],
        [""],
        [],
        ["localhost:{port}", "evil.example"],
        ["localhost:{port}, evil.example"],
    ],
)
@pytest.mark.parametrize("path", ["/", "/version", "/nothing"])
def test_other_names_of_this_machine_are_not(port, hosts, path):
    code, _, body = ask(port, *(f"Host: {host.format(port=port)}" for host in hosts), first=f"GET {path} HTTP/1.1")
    assert code == 421
    assert "secret" not in body
    assert f"http://127.0.0.1:{port}/" in body


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://localhost", "https://localhost:{port}", "http://[::1]:{port}", ""]
)
def test_other_pages_are_refused(port, origin):
    code, headers, body = ask(port, f"Host: localhost:{port}", f"Origin: {origin.format(port=port)}")
    assert code == 403
    assert "secret" not in body
    assert "access-control-allow-origin" not in headers


def test_only_reading(port):
    here = f"Host: localhost:{port}"
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT"):
        code, headers, _ = ask(port, here, first=f"{method} / HTTP/1.1")
        assert code == 405, method
        assert headers["allow"] == "get, head"
    assert ask(port, here, first="BREW / HTTP/1.1")[0] == 501
    code, headers, body = ask(port, here, first="HEAD / HTTP/1.1")
    assert (code, body) == (200, "")
    assert int(headers["content-length"]) > 1000
    assert ask(port, "Host: evil.example", first="HEAD / HTTP/1.1")[0] == 421


@pytest.mark.parametrize("first", ["GET / HTTP/1.1", "GET /nothing HTTP/1.1", "POST / HTTP/1.1", "BREW / HTTP/1.1"])
@pytest.mark.parametrize("host", ["localhost:{port}", "evil.example"])
def test_headers_of_every_answer(port, first, host):
    _, headers, _ = ask(port, f"Host: {host.format(port=port)}", first=first)
    policy = headers["content-security-policy"]
    assert all(part in policy for part in ("default-src 'none'", "frame-ancestors 'none'", "connect-src 'self'"))
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-frame-options"] == "deny"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert headers["cache-control"] == "no-store"
    assert "python" not in headers["server"]


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium")
def test_the_page_is_drawn_and_asks_for_news(port, tmp_path):
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'browser'}"]
    command = ["chromium", *flags, "--virtual-time-budget=3000", "--dump-dom", f"http://localhost:{port}/"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert 'data-live="on"' in found.stdout
    assert "<h1" in found.stdout


def test_it_listens_on_this_machine_only(tmp_path: Path):
    with make_server(tmp_path, 0) as server:
        assert server.server_address[0] == "127.0.0.1"
