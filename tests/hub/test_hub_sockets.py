"""Large bodies come straight from the socket, where the library's client would do the same, and in no other case."""

import shutil
import ssl
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.request import getproxies

import pytest
from hub_models import model
from huggingface_hub import set_client_factory
from huggingface_hub.utils import get_session

from shardctl.storage.addresses import open_source
from shardctl.storage.hub import sockets
from shardctl.storage.hub.sockets import SocketPool
from shardctl.storage.retries import TroubleError

NAME = "someone/llama"
SHARD = "model-00001-of-00003.safetensors"


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    for name in getproxies():
        monkeypatch.delenv(f"{name}_proxy", raising=False)
        monkeypatch.delenv(f"{name}_PROXY".upper(), raising=False)


@pytest.fixture
def by(hub, monkeypatch):
    """Read a shard, and say which client did."""
    hub.add(NAME, model())
    used = []
    real = SocketPool.get
    monkeypatch.setattr(SocketPool, "get", lambda *args: used.append("sockets") or real(*args))

    def by():
        into = bytearray(len(model()[SHARD]))
        open_source(NAME).read_at(SHARD, 0, memoryview(into))
        assert into == model()[SHARD]
        return used

    return by


def test_addresses_of_the_store_are_asked_directly(by):
    assert by() == ["sockets"]


def test_not_with_a_client_of_ones_own(by):
    from huggingface_hub.utils import _http

    client = type(get_session())
    set_client_factory(client)
    try:
        assert by() == []
    finally:
        set_client_factory(_http.default_client_factory)


def test_not_through_a_proxy(monkeypatch):
    url = "http://store.example/file"
    assert SocketPool(1).reach(url)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert not SocketPool(1).reach(url)
    assert SocketPool(1).reach("https://store.example/file")
    monkeypatch.setenv("no_proxy", "store.example")
    assert SocketPool(1).reach(url)
    monkeypatch.setenv("all_proxy", "http://127.0.0.1:9")
    assert not SocketPool(1).reach("https://other.example/file")


@pytest.mark.parametrize(
    "url", ["ftp://store.example/file", "http://user:password@store.example/file", "http://store.example/ä"]
)
def test_not_where_more_is_needed_than_an_address(url):
    assert not SocketPool(1).reach(url)


def test_connections_are_used_again_and_replaced_when_the_other_side_closed_them(hub):
    hub.add(NAME, {"a.bin": bytes(300_000)})
    source = open_source(NAME)
    for offset in range(0, 300_000, 100_000):
        source.read_at("a.bin", offset, memoryview(bytearray(70_000)))
    assert hub.connections == 2, "one to each server"
    held = source._ranges._sockets
    for _, connection in held._idle:
        connection.sock.shutdown(2)
    source.read_at("a.bin", 90_000, memoryview(bytearray(70_000)))
    assert hub.connections == 3
    source.close()
    assert not held._idle


class _Secret(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.send_response(206)
        self.send_header("Content-Length", "6")
        self.end_headers()
        self.wfile.write(b"secret")

    def log_message(self, *_):
        """Stay silent."""


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    """A server with a certificate that only we believe; its address and the certificate."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", key, "-out", certificate,
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Secret)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    yield f"https://localhost:{server.server_port}/x", certificate
    server.shutdown()
    server.server_close()


def test_certificates_are_those_that_the_library_believes(tls, monkeypatch):
    url, certificate = tls
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    with pytest.raises(TroubleError, match="certificate"), SocketPool(5).get(url, {}):
        pass
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    into = bytearray(6)
    with SocketPool(5).get(url, {}) as body:
        assert body.readinto(memoryview(into)) == 6
        assert body.is_exhausted()
    assert bytes(into) == b"secret"


def test_a_server_that_says_nothing_is_waited_for_as_long_as_was_asked():
    import socket

    silent = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
    with (
        pytest.raises(TroubleError, match="timed out"),
        SocketPool(0.2).get(url, {}),
    ):
        pass
    silent.close()


def test_what_has_come_is_there_at_once():
    """So that a signal is heard between the drops of a server that trickles."""
    import socket

    trickling = socket.create_server(("127.0.0.1", 0))

    def first_drop():
        connection, _ = trickling.accept()
        connection.recv(4096)
        connection.sendall(b"HTTP/1.1 206 Partial Content\r\nContent-Length: 100\r\n\r\ndrop")
        kept.append(connection)

    kept = []
    threading.Thread(target=first_drop, daemon=True).start()
    into = bytearray(100)
    with SocketPool(2).get(f"http://127.0.0.1:{trickling.getsockname()[1]}/", {}) as body:
        assert body.readinto(memoryview(into)) == 4
    assert into[:4] == b"drop"
    for each in (trickling, *kept):
        each.close()


def test_the_library_is_known_by_its_client():
    assert sockets._is_default_client()
