"""A server on loopback that speaks the Hub's routes, and does what goes wrong on the way when it is told to.

Routes and headers are those that huggingface_hub 2.4 asks for and reads (`hf_api.py`: `repo_info`, `list_repo_tree`;
`utils/_pagination.py`; `file_download.py`: `hf_hub_url`, `get_hf_file_metadata`; `utils/_http.py`:
`hf_raise_for_status`). Large files are on a second server with another port, so another origin, as on the Hub.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

PAGE = 50
"""Entries of a page of a tree; the Hub gives 1,000."""
_REVISION = re.compile(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?")
_TREE = re.compile(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)")
_XET_TOKEN = re.compile(r"/api/models/([^/]+/[^/]+)/xet-read-token/([^/]+)")
_PREUPLOAD = re.compile(r"/api/models/([^/]+/[^/]+)/preupload/([^/]+)")
_BATCH = re.compile(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch")
_COMMIT = re.compile(r"/api/models/([^/]+/[^/]+)/commit/([^/]+)")
_BRANCH = re.compile(r"/api/models/([^/]+/[^/]+)/branch/([^/]+)")
_HEADERS = re.compile(r"/api/models/([^/]+/[^/]+)/safetensors-metadata/(.+)")
_RESOLVE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


class Sparse:
    """A file of which only the beginning is real, so that it can be as large as large ones are; the rest is zeros."""

    def __init__(self, head: bytes, size: int, *, hashed: bool = False) -> None:
        """`hashed` says whether its hash should be right, which takes as long as reading it all."""
        self.head, self.size, self.hashed = head, size, hashed

    def __len__(self):
        return self.size

    def __getitem__(self, part):
        start, stop, _ = part.indices(self.size)
        real = self.head[start:stop]
        return real + bytes(max(stop - start - len(real), 0))


def git_name(content):
    """Git's name of a blob."""
    if isinstance(content, Sparse):
        content = content.head
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


@cache
def _sha256(content):
    state, size = hashlib.sha256(content.head), len(content) if content.hashed else 0
    for start in range(len(content.head), size, 1 << 20):
        state.update(content[start : start + (1 << 20)])
    return state.hexdigest()


def sha256(content):
    return _sha256(content) if isinstance(content, Sparse) else hashlib.sha256(content).hexdigest()


@dataclass
class Repository:
    commits: dict = field(default_factory=dict)
    """By commit, the content of each file by path."""
    references: dict = field(default_factory=dict)
    gated: bool = False
    private: bool = False
    parents: dict = field(default_factory=dict)
    """By commit, the one before."""
    xet: dict = field(default_factory=dict)
    """Names in Xet of what is kept there, by path."""
    cas: str = ""
    """The address of Xet's server."""
    large: tuple = (".safetensors", ".bin", ".distcp")
    """Suffixes of what LFS keeps."""

    def push(self, files, branch="main"):
        """Make a commit of these files and move the branch to it; returns its name."""
        text = repr(sorted((path, sha256(content)) for path, content in files.items())) + str(len(self.commits))
        commit = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
        self.commits[commit] = dict(files)
        self.parents[commit] = self.references.get(branch)
        self.references[branch] = commit
        return commit

    def commit(self, revision):
        return self.references.get(revision, revision if revision in self.commits else None)


@dataclass
class Request:
    server: str
    """`hub` or `cdn`."""
    route: str
    """`info`, `tree`, `resolve` or `cdn`."""
    path: str
    range: str
    token: str


class HubServer:
    """Both servers, their repositories and their faults."""

    def __init__(self):
        self.repositories = {}
        self.tokens = {"hf_good"}
        self.requests = []
        self.sent = Counter()
        """Bytes of bodies by route."""
        self.connections = 0
        self.other = ""
        """The address of another server, where an answer may lead."""
        self.objects = {}
        """What LFS was sent, by SHA-256; commits refer to it."""
        self.verifies = ""
        """The address at which uploads of LFS are verified, if they are."""
        self.uses = None
        """How often a signed address is good, if not for ever."""
        self._signed = {}
        self._faults = []
        self._lock = threading.Lock()
        self._servers = [_serve(self, _Hub), _serve(self, _Store)]
        self.url, self.store = (f"http://127.0.0.1:{server.server_port}" for server in self._servers)

    def add(self, name, files=None, **more):
        repository = self.repositories[name] = Repository(**more)
        if files is not None:
            repository.push(files)
        return repository

    def fail(self, route, *faults, path=""):
        """Let the next requests of a route go wrong, one after the other; None lets one pass.

        A fault is a function of the handler, the content and the range, and answers itself.
        """
        with self._lock:
            self._faults += [(route, path, fault) for fault in faults]

    def fault(self, route, path):
        with self._lock:
            for place, (wanted, part, fault) in enumerate(self._faults):
                if wanted == route and part in path:
                    del self._faults[place]
                    return fault
        return None

    @property
    def faults_left(self):
        return len(self._faults)

    def sign(self, content):
        """An address of the store for a file's content."""
        with self._lock:
            key = f"{len(self._signed)}"
            self._signed[key] = [content, self.uses]
        return f"{self.store}/{sha256(content)}?Expires=1&Signature={key}"

    def expire(self):
        """Let every address that was given be refused."""
        with self._lock:
            for entry in self._signed.values():
                entry[1] = 0

    def signed(self, key):
        with self._lock:
            entry = self._signed.get(key)
            if entry is None or entry[1] == 0:
                return None
            if entry[1] is not None:
                entry[1] -= 1
            return entry[0]

    def log(self, *what):
        with self._lock:
            self.requests.append(Request(*what))

    def count(self, route, nbytes):
        with self._lock:
            self.sent[route] += nbytes

    def asked(self, route):
        return [request for request in self.requests if request.route == route]

    def close(self):
        for server in self._servers:
            server.shutdown()
            server.server_close()


def _serve(hub, handler):
    server = ThreadingHTTPServer(("127.0.0.1", 0), type(handler.__name__, (handler,), {"hub": hub}))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    return server


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16
    disable_nagle_algorithm = True
    hub: HubServer
    route = ""

    def setup(self):
        super().setup()
        with self.hub._lock:
            self.hub.connections += 1

    def log_message(self, *_):
        """Stay silent."""

    @property
    def token(self):
        return self.headers.get("authorization", "").removeprefix("Bearer ")

    def began(self, route, path):
        """Note a request, and let it go wrong if it should; returns whether it did."""
        self.route = route
        self.hub.log(type(self).__name__.strip("_").lower(), route, path, self.headers.get("range", ""), self.token)
        return self.hub.fault(route, path)

    def answer(self, status, body=b"", **headers):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.write(body)

    def json(self, document, **headers):
        self.answer(200, json.dumps(document).encode(), Content_Type="application/json", **headers)

    def write(self, body):
        if self.command != "HEAD":
            self.wfile.write(body)
            self.hub.count(self.route, len(body))

    def give(self, content, fault=None, **headers):
        """Give the range that was asked for, or all of it."""
        found = re.fullmatch(r"bytes=([0-9]+)-([0-9]+)", self.headers.get("range", ""))
        size = len(content)
        start, stop = (int(found[1]), min(int(found[2]) + 1, size)) if found else (0, size)
        if fault is not None:
            fault(self, content, start, stop)
        elif found and start >= size:
            self.answer(416, Content_Range=f"bytes */{size}")
        elif found:
            self.answer(206, content[start:stop], Content_Range=f"bytes {start}-{stop - 1}/{size}", **headers)
        else:
            self.answer(200, content[0:size], **headers)

    def drop(self):
        """End the connection."""
        self.wfile.flush()
        self.close_connection = True


class _Hub(_Handler):
    def do_GET(self):
        parts = urlsplit(self.path)
        path = parts.path
        if tree := _TREE.fullmatch(path):
            self._tree(tree[1], unquote(tree[2]), parse_qs(parts.query))
        elif xet := _XET_TOKEN.fullmatch(path):
            self._xet_token(xet[1])
        elif headers := _HEADERS.fullmatch(path):
            self._headers(headers[1], unquote(headers[2]))
        elif info := _REVISION.fullmatch(path):
            self._info(info[1], unquote(info[2] or "main"))
        elif file := _RESOLVE.fullmatch(path):
            self._resolve(file[1], unquote(file[2]), unquote(file[3]))
        else:
            self.answer(404)

    do_HEAD = do_GET  # noqa: N815 - the name that the library calls

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        path = urlsplit(self.path).path
        ways = {_PREUPLOAD: self._preupload, _BATCH: self._batch, _COMMIT: self._commit, _BRANCH: self._branch}
        for pattern, way in ways.items():
            if found := pattern.fullmatch(path):
                return way(*map(unquote, found.groups()), body)
        if path == "/api/validate-yaml":
            return self.json({"errors": [], "warnings": []})
        return self._create(body) if path == "/api/repos/create" else self.answer(404)

    def _writable(self, route, name, revision="main"):
        """The repository and commit, or None after an answer that refuses somebody who may not write."""
        if fault := self.began(route, name):
            return fault(self, b"", 0, 0)
        if self.token not in self.hub.tokens:
            return self.answer(401, X_Error_Message="Invalid username or password.")
        return self._known(name, revision)

    def _create(self, body):
        asked = json.loads(body)
        name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
        if fault := self.began("create", name):
            return fault(self, b"", 0, 0)
        if self.token not in self.hub.tokens:
            return self.answer(401, X_Error_Message="Invalid username or password.")
        if name in self.hub.repositories:
            return self.answer(409)
        private = asked.get("visibility") == "private"
        self.hub.add(name, {".gitattributes": b"*.safetensors filter=lfs\n"}, private=private)
        return self.json({"url": f"{self.hub.url}/{name}", "name": name, "id": "1"})

    def _branch(self, name, branch, _body):
        if found := self._writable("branch", name):
            found[0].references[branch] = found[1]
            self.json({})

    def _preupload(self, name, revision, body):
        """Which files are large, by the attributes of the repository (here by their suffixes)."""
        if found := self._writable("preupload", name, revision):
            ignored = found[0].commits[found[1]].get(".gitignore", b"").decode().split()
            files = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(found[0].large) else "regular",
                    "shouldIgnore": file["path"] in ignored,
                }
                for file in json.loads(body)["files"]
            ]
            self.json({"files": files})

    def _batch(self, name, body):
        """Where to send large files; what is known already needs no sending (Git LFS, `docs/api/batch.md`)."""
        if self._writable("batch", name):
            objects = []
            for each in json.loads(body)["objects"]:
                href = f"{self.hub.store}/upload/{each['oid']}?Signature=1"
                there = each["oid"] in self.hub.objects
                verify = {"verify": {"href": self.hub.verifies}} if self.hub.verifies else {}
                objects.append(each | ({} if there else {"actions": {"upload": {"href": href}} | verify}))
            self.json({"transfer": "basic", "objects": objects})

    def _commit(self, name, branch, body):
        """Apply one line for each change, or none of them."""
        found = self._writable("commit", name, branch)
        if not found:
            return None
        repository, parent = found
        files, large = dict(repository.commits[parent]), self.hub.objects
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                if value.get("parentCommit", parent) != parent:
                    return self.answer(412, X_Error_Message="A commit has happened since. Please refresh.")
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                if value["oid"] not in large or len(large[value["oid"]]) != value["size"]:
                    return self.answer(400, X_Error_Message="a LFS pointer points to a file that does not exist")
                files[value["path"]] = large[value["oid"]]
            else:
                assert line["key"] == "deletedFile"
                del files[value["path"]]
        commit = repository.push(files, branch)
        url = f"{self.hub.url}/{name}/commit/{commit}"
        return self.json({"success": True, "commitOid": commit, "commitUrl": url, "hookOutput": ""})

    def _known(self, name, revision, *, file=False):
        """The repository and commit, or None after an answer that refuses them."""
        if self.token and self.token not in self.hub.tokens:
            return self.answer(401, X_Error_Message="Invalid credentials in Authorization header")
        repository = self.hub.repositories.get(name)
        if repository is None:
            return self.answer(
                404 if self.token else 401,
                X_Error_Code="RepoNotFound",
                X_Error_Message="Repository not found" if self.token else "Invalid username or password.",
            )
        commit = repository.commit(revision)
        if commit is None:
            return self.answer(404, X_Error_Code="RevisionNotFound", X_Error_Message=f"Invalid rev id: {revision}")
        if file and repository.gated and self.token not in self.hub.tokens:
            message = "Access to this model is restricted."
            return self.answer(401, X_Error_Code="GatedRepo", X_Error_Message=message)
        return repository, commit

    def _info(self, name, revision):
        if fault := self.began("info", name):
            return fault(self, b"", 0, 0)
        found = self._known(name, revision)
        if found:
            said = {"_id": "1", "id": name, "modelId": name, "sha": found[1], "siblings": [], "tags": []}
            self.json(said | {"private": found[0].private})
        return None

    def _headers(self, name, index):
        """Every header of main, as JSON, and the index without its map (huggingface_hub 2.4, `hf_api.py`)."""
        if fault := self.began("headers", name):
            return fault(self, b"", 0, 0)
        found = self._known(name, "main", file=True)
        if not found:
            return None
        files = found[0].commits[found[1]]
        weights = json.loads(files[index])
        headers = {}
        for path in sorted(set(weights.pop("weight_map").values())):
            length = int.from_bytes(files[path][0:8], "little")
            headers[path] = json.loads(files[path][8 : 8 + length])
        return self.json({"index": weights, "headers": headers})

    def _xet_token(self, name):
        if fault := self.began("xet", name):
            return fault(self, b"", 0, 0)
        repository = self.hub.repositories[name]
        return self.json({"casUrl": repository.cas, "exp": int(time.time()) + 3600, "accessToken": "xet"})

    def _tree(self, name, revision, query):
        if fault := self.began("tree", name):
            return fault(self, b"", 0, 0)
        found = self._known(name, revision)
        if not found:
            return None
        repository, commit = found
        entries = []
        for path, content in sorted(repository.commits[commit].items()):
            entry = {"type": "file", "path": path, "size": len(content), "oid": git_name(content)}
            if path.endswith(repository.large):
                entry["lfs"] = {"oid": sha256(content), "size": len(content), "pointerSize": 134}
            if path in repository.xet:
                entry["xetHash"] = repository.xet[path]
            entries.append(entry)
        folders = sorted({path.rpartition("/")[0] for path in repository.commits[commit]} - {""})
        entries += [{"type": "directory", "path": folder, "size": 0, "oid": "0" * 40} for folder in folders]
        start = int(query.get("cursor", ["0"])[0])
        more = {}
        if start + PAGE < len(entries):
            link = f"{self.hub.url}/api/models/{name}/tree/{revision}?recursive=True&cursor={start + PAGE}"
            more["Link"] = f'<{link}>; rel="next"'
        return self.json(entries[start : start + PAGE], **more)

    def _resolve(self, name, revision, path):
        fault = self.began("resolve", path)
        found = self._known(name, revision, file=True)
        if not found:
            return None
        repository, commit = found
        content = repository.commits[commit].get(path)
        if content is None:
            return self.answer(404, X_Error_Code="EntryNotFound", X_Error_Message="Entry not found")
        if not path.endswith(repository.large):
            return self.give(content, fault, ETag=f'"{git_name(content)}"', X_Repo_Commit=commit)
        if fault is not None:
            return fault(self, content, 0, len(content))
        return self.answer(
            302,
            b"Found",
            Location=self.hub.sign(content),
            X_Repo_Commit=commit,
            X_Linked_Etag=f'"{sha256(content)}"',
            X_Linked_Size=str(len(content)),
        )


class _Store(_Handler):
    def do_PUT(self):
        content = self.rfile.read(int(self.headers["content-length"]))
        oid = urlsplit(self.path).path.rpartition("/")[2]
        if fault := self.began("put", oid):
            return fault(self, content, 0, len(content))
        assert not self.token, "the token must not leave the Hub"
        assert sha256(content) == oid
        self.hub.objects[oid] = content
        return self.answer(200)

    def do_GET(self):
        parts = urlsplit(self.path)
        fault = self.began("cdn", parts.path)
        assert not self.token, "the token must not leave the Hub"
        content = self.hub.signed(parse_qs(parts.query)["Signature"][0])
        if content is None:
            return self.answer(403, b"<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>")
        return self.give(content, fault, ETag='"another"')


# What goes wrong.


def status(number, **headers):
    def status(handler, *_):
        named = {name: value.replace("{other}", handler.hub.other) for name, value in headers.items()}
        handler.answer(number, b"trouble", **named)

    return status


def ignored_range(handler, content, _start, _stop):
    """All of the file with status 200, as a proxy that does not know ranges gives it."""
    handler.answer(200, content[0 : len(content)])


def short_body(handler, content, start, stop):
    """All is announced, half of it comes, and the connection ends."""
    _head(handler, stop - start, f"bytes {start}-{stop - 1}/{len(content)}")
    handler.write(content[start : start + (stop - start) // 2])
    handler.drop()


def short_answer(handler, content, start, stop):
    """A shorter range, announced as what was asked for is not: object stores do so at the end of a file."""
    middle = start + max((stop - start) // 2, 1)
    handler.answer(206, content[start:middle], Content_Range=f"bytes {start}-{middle - 1}/{len(content)}")


def short_length(handler, content, start, stop):
    """The right range by its name, and half of it by its length."""
    half = content[start : start + (stop - start) // 2]
    handler.answer(206, half, Content_Range=f"bytes {start}-{stop - 1}/{len(content)}")


def other_range(handler, content, start, stop):
    """A range that was not asked for."""
    body = content[start + 1 : stop + 1]
    handler.answer(206, body, Content_Range=f"bytes {start + 1}-{start + len(body)}/{len(content)}")


def no_range(handler, content, start, stop):
    """Part of the file, without saying which."""
    handler.answer(206, content[start:stop])


def other_size(handler, content, start, stop):
    """Of a file of another size."""
    handler.answer(206, content[start:stop], Content_Range=f"bytes {start}-{stop - 1}/{len(content) + 1}")


def too_long(handler, content, start, stop):
    """More than was asked for, in chunks, so that no length is announced."""
    handler.send_response(206)
    handler.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(content)}")
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    body = content[start:stop] + b"more"
    handler.write(b"%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n")


def trickle(handler, content, start, stop):
    """A byte every tenth of a second, which no silence ends."""
    _head(handler, stop - start, f"bytes {start}-{stop - 1}/{len(content)}")
    _pour(handler, iter(lambda: b"x", b""), 0.1)


def without_end(number, **headers):
    """An answer whose body never ends."""

    def without_end(handler, *_):
        handler.send_response(number)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        _pour(handler, iter(lambda: b"x" * 65536, b""), 0)

    return without_end


def only_interim(handler, *_):
    """One interim answer after the other, and never a final one."""
    _pour(handler, iter(lambda: b"HTTP/1.1 100 Continue\r\n\r\n", b""), 0.01)


def next_page(link):
    """A page of a listing that names the next one; `{hub}` and `{path}` stand for the server and what was asked."""

    def next_page(handler, *_):
        address = link.format(hub=handler.hub.url, other=handler.hub.other, path=handler.path)
        handler.json([], Link=f'<{address}>; rel="next"')

    return next_page


def _pour(handler, pieces, pause):
    """Send pieces until the other side has enough."""
    handler.close_connection = True
    handler.wfile.flush()
    try:
        for piece in pieces:
            handler.connection.sendall(piece)
            handler.hub.count("poured", len(piece))
            time.sleep(pause)
    except OSError:
        pass


def flipped_bit(handler, content, start, stop):
    """Everything is right but one bit."""
    body = bytearray(content[start:stop])
    body[len(body) // 2] ^= 1
    handler.answer(206, bytes(body), Content_Range=f"bytes {start}-{stop - 1}/{len(content)}")


def dropped(handler, *_):
    """No answer."""
    handler.drop()


def encoded(handler, content, start, stop):
    """Compressed by somebody on the way."""
    handler.answer(
        206, content[start:stop], Content_Range=f"bytes {start}-{stop - 1}/{len(content)}", Content_Encoding="gzip"
    )


def _head(handler, length, content_range):
    handler.send_response(206)
    handler.send_header("Content-Length", str(length))
    handler.send_header("Content-Range", content_range)
    handler.end_headers()
