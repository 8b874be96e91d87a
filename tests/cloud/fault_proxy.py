"""A store as its network makes it: a proxy on loopback that passes requests on, or does to them what a test asks."""

import contextlib
import http.client
import sys
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

LOST = "lost"
"""The request reaches the store, and its answer never comes back: the connection ends."""
HOPS = {"connection", "transfer-encoding", "content-length", "keep-alive"}


class FaultProxy:
    """Forwards to `upstream`; `fault` is asked about every request, and answers None, LOST or an answer of its own."""

    def __init__(self, upstream):
        self.upstream = urllib.parse.urlsplit(upstream)
        self.fault = lambda method, path: None  # noqa: ARG005 - the names are the protocol
        self.requests = []
        self.turns = contextlib.nullcontext()
        """Held while the store carries a request out; a lock makes it carry out one after another."""
        self._server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"proxy": self}))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def endpoint(self):
        return f"http://127.0.0.1:{self._server.server_port}{self.upstream.path}"

    def close(self):
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    def handle_error(self, *where):
        """Print nothing about clients that were killed."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(*where)


class _Handler(BaseHTTPRequestHandler):
    """Looks the same for every method."""

    protocol_version = "HTTP/1.1"
    proxy = None

    def log_message(self, *_):
        pass

    def __getattr__(self, name):
        if name.startswith("do_"):
            return self._handle
        raise AttributeError(name)

    def _handle(self):
        body = self._body()
        self.proxy.requests.append((self.command, self.path))
        fault = self.proxy.fault(self.command, self.path)
        if isinstance(fault, tuple):
            self._give(*fault)
            return
        upstream = http.client.HTTPConnection(self.proxy.upstream.netloc, timeout=60)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in HOPS}
        with self.proxy.turns:
            upstream.request(self.command, self.path, body or None, headers | {"Content-Length": str(len(body))})
            answer = upstream.getresponse()
            content = answer.read()
        upstream.close()
        if fault == LOST:
            self.close_connection = True
            return
        self._give(answer.status, content, dict(answer.getheaders()), len(content))

    def _body(self):
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        found = b""
        while size := int(self.rfile.readline().partition(b";")[0], 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return found

    def _give(self, status, content=b"", headers=None, size=None):
        self.send_response(status)
        length = next((v for n, v in (headers or {}).items() if n.lower() == "content-length"), None)
        for name, value in (headers or {}).items():
            if name.lower() not in HOPS:
                self.send_header(name, value)
        self.send_header("Content-Length", length if self.command == "HEAD" and length else str(size or len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
