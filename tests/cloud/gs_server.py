"""A small Google Cloud Storage for tests, in memory, as its XML API is documented.

cloud.google.com/storage/docs/xml-api: objects are put, got by ranges, looked at, listed page by page and removed; large
ones are sent in parts. No emulator that installs speaks this API whole: fake-gcs-server refuses a PUT of an object, and
gcp-storage-emulator has no uploads in parts.
"""

import hashlib
import itertools
import re
import threading
import urllib.parse
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from xml.sax.saxutils import escape

PAGE = 5
"""Keys in one answer to a listing; Google gives 1,000, which no test would reach."""
LEAST_PART = 5 << 20
META = "x-goog-meta-"


class GoogleStore:
    """Buckets, each with its objects, and the uploads that are neither complete nor given up."""

    def __init__(self):
        self.buckets, self.uploads = {}, {}
        self._generations = itertools.count(1_700_000_000_000_000)
        self._lock = threading.Lock()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"store": self}))
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def endpoint(self):
        return f"http://127.0.0.1:{self.server.server_port}"

    def close(self):
        self.server.shutdown()
        self.server.server_close()

    def put(self, bucket, key, content, meta, etag=None, wanted=None):
        """Store an object, if the generation there is the `wanted` one (0 for none); None if it is not.

        An ETag is the MD5 of what was put at once, and means nothing of what came in parts.
        """
        with self._lock:
            if wanted is not None and int(wanted) != self.buckets[bucket].get(key, (None, None, 0))[2]:
                return None
            generation = next(self._generations)
            etag = etag or f'"{hashlib.md5(content, usedforsecurity=False).hexdigest()}"'
            self.buckets[bucket][key] = (content, etag, generation, meta)
        return etag, generation

    def number(self):
        with self._lock:
            return next(self._generations)


def _all(tag, text):
    return re.findall(f"<{tag}>([^<]*)</{tag}>", text)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store = None

    def log_message(self, *_):
        pass

    def do_GET(self):
        self._with_object(self._list, self._get)

    def do_HEAD(self):
        self._with_object(self._list, self._get)

    def do_PUT(self):
        self._with_object(self._make, self._put)

    def do_POST(self):
        self._with_object(lambda *_: self._refuse(400, "InvalidArgument"), self._post)

    def do_DELETE(self):
        self._with_object(lambda *_: self._refuse(400, "InvalidArgument"), self._delete)

    def _with_object(self, on_bucket, on_object):
        path, _, query = self.path.partition("?")
        bucket, _, key = path.lstrip("/").partition("/")
        self.bucket, self.key = urllib.parse.unquote(bucket), urllib.parse.unquote(key)
        self.query = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.bucket not in self.store.buckets and on_bucket != self._make:
            self._refuse(404, "NoSuchBucket")
        elif self.key:
            on_object(self.store.buckets[self.bucket])
        else:
            on_bucket(self.store.buckets.get(self.bucket))

    def _make(self, _):
        self.store.buckets[self.bucket] = {}
        self._answer(200)

    def _list(self, objects):
        prefix, after = self.query.get("prefix", ""), self.query.get("continuation-token", "")
        keys = sorted(key for key in objects if key.startswith(prefix) and key > after)
        page, more = keys[:PAGE], len(keys) > PAGE
        rows = "".join(
            f"<Contents><Key>{escape(key)}</Key><Generation>{objects[key][2]}</Generation>"
            f"<LastModified>2026-01-02T03:04:05.678Z</LastModified><ETag>{objects[key][1]}</ETag>"
            f"<Size>{len(objects[key][0])}</Size></Contents>"
            for key in page
        )
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        self._xml("ListBucketResult", f"<IsTruncated>{str(more).lower()}</IsTruncated>{rows}{token}")

    def _get(self, objects):
        if self.key not in objects:
            self._refuse(404, "NoSuchKey")
            return
        content, etag, generation, meta = objects[self.key]
        wanted = self.headers.get("If-Match")
        if wanted not in {None, "*", etag}:
            self._refuse(412, "PreconditionFailed")
            return
        headers = {"ETag": etag, "x-goog-generation": generation, "Last-Modified": formatdate(0, usegmt=True), **meta}
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if match is None:
            self._answer(200, content, headers)
            return
        start, stop = int(match[1]), min(int(match[2] or len(content)) + 1, len(content))
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
        self._answer(206, content[start:stop], headers)

    def _put(self, _):
        if "uploadId" in self.query:
            upload = self.store.uploads.get(self.query["uploadId"])
            if upload is None:
                self._refuse(404, "NoSuchUpload")
                return
            etag = f'"{hashlib.md5(self.body, usedforsecurity=False).hexdigest()}"'
            upload[2][int(self.query["partNumber"])] = (etag, self.body)
            self._answer(200, headers={"ETag": etag})
            return
        content, meta = self.body, self._meta()
        copied = self.headers.get("x-goog-copy-source")
        if copied:
            bucket, _, key = copied.lstrip("/").partition("/")
            found = self.store.buckets[urllib.parse.unquote(bucket)].get(urllib.parse.unquote(key))
            if found is None:
                self._refuse(404, "NoSuchKey")
                return
            content, _, _, meta = found
        wanted = self.headers.get("x-goog-if-generation-match")
        done = self.store.put(self.bucket, self.key, content, meta, wanted=wanted)
        if done is None:
            self._refuse(412, "PreconditionFailed")
            return
        etag, generation = done
        self._answer(200, headers={"ETag": etag, "x-goog-generation": generation})

    def _post(self, _):
        if "uploads" in self.query:
            name = f"upload-{self.store.number()}"
            self.store.uploads[name] = (self.bucket, self.key, {}, self._meta())
            self._xml("InitiateMultipartUploadResult", f"<UploadId>{name}</UploadId>")
            return
        upload = self.store.uploads.get(self.query["uploadId"])
        if upload is None:
            self._refuse(404, "NoSuchUpload")
            return
        text = self.body.decode().replace("&quot;", '"')
        said = list(zip(map(int, _all("PartNumber", text)), _all("ETag", text), strict=True))
        parts = upload[2]
        if not said or any(parts.get(number, ("",))[0].strip('"') != etag.strip('"') for number, etag in said):
            self._refuse(400, "InvalidPart")
        elif any(len(parts[number][1]) < LEAST_PART for number, _ in said[:-1]):
            self._refuse(400, "EntityTooSmall")
        else:
            del self.store.uploads[self.query["uploadId"]]
            content = b"".join(parts[number][1] for number, _ in said)
            etag, generation = self.store.put(
                self.bucket, self.key, content, upload[3], f'"{self.store.number():x}-{len(said)}"'
            )
            self._xml("CompleteMultipartUploadResult", f"<ETag>{etag}</ETag>", {"x-goog-generation": generation})

    def _delete(self, objects):
        if "uploadId" in self.query:
            gone = self.store.uploads.pop(self.query["uploadId"], None)
        else:
            gone = objects.pop(self.key, None)
        if gone is None:
            self._refuse(404, "NoSuchKey")
        else:
            self._answer(204)

    def _meta(self):
        return {name.lower(): value for name, value in self.headers.items() if name.lower().startswith(META)}

    def _xml(self, root, inner, headers=None):
        self._answer(200, f"<?xml version='1.0' encoding='UTF-8'?><{root}>{inner}</{root}>".encode(), headers)

    def _refuse(self, status, code):
        self._answer(
            status, f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
        )

    def _answer(self, status, body=b"", headers=None):
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, str(value))
        if status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
