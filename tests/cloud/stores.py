"""The three kinds of stores that shardctl writes to, each behind a proxy, with one way to look into all of them."""

import contextlib
import itertools
import json
from contextlib import suppress

import obstore
from azurite import ACCOUNT, KEY, AzuriteProcess
from fault_proxy import FaultProxy
from gs_server import GoogleStore

_numbers = itertools.count()


class MotoStore:
    """S3, by moto."""

    def __init__(self):
        from moto.server import ThreadedMotoServer

        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._server.start()
        host, port = self._server.get_host_and_port()
        self.endpoint = f"http://{host}:{port}"

    def make(self, bucket):
        import boto3

        keys = {"aws_access_key_id": "x", "aws_secret_access_key": "y", "region_name": "us-east-1"}
        boto3.client("s3", endpoint_url=self.endpoint, **keys).create_bucket(Bucket=bucket)

    def close(self):
        self._server.stop()


class MadeGoogleStore(GoogleStore):
    """Google's, by the small server of these tests."""

    def make(self, bucket):
        self.buckets[bucket] = {}


KINDS = {"s3": MotoStore, "az": AzuriteProcess, "gs": MadeGoogleStore}


def variables(scheme, endpoint, folder):
    """What a user sets in the environment to reach a store at an address of its own."""
    if scheme == "s3":
        keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y"}
        return keys | {"AWS_REGION": "us-east-1", "AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": endpoint}
    if scheme == "az":
        keys = {"AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": KEY}
        return keys | {"AZURE_STORAGE_ENDPOINT": endpoint}
    key = folder / "google.json"
    empty = dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
    key.write_text(json.dumps({"gcs_base_url": endpoint, "disable_oauth": True, **empty}))
    return {"GOOGLE_SERVICE_ACCOUNT": str(key)}


class StorePlace:
    """A bucket of its own in a store."""

    def __init__(self, scheme, store, folder):
        self.scheme, self.bucket = scheme, f"place-{next(_numbers)}"
        self.proxy = FaultProxy(store.endpoint)
        self.environment = variables(scheme, self.proxy.endpoint, folder)
        store.make(self.bucket)
        self._store = store

    def address(self, path=""):
        return f"{self.scheme}://{self.bucket}/{path}".rstrip("/")

    def _opened(self):
        return obstore.store.from_url(self.address(), client_options={"allow_http": True})

    def held(self, prefix=""):
        """Every object below a prefix, by key without it."""
        store = self._opened()
        found = {}
        for key in sorted(self.keys(prefix)):
            with contextlib.suppress(FileNotFoundError):  # the last request of a killed run may still delete it
                found[key.removeprefix(prefix)] = bytes(obstore.get(store, key).bytes())
        return found

    def keys(self, prefix=""):
        return {meta["path"] for batch in obstore.list(self._opened(), prefix=prefix or None) for meta in batch}

    def put(self, key, content):
        obstore.put(self._opened(), key, content)

    def fill(self, prefix, folder):
        for path in folder.rglob("*"):
            if path.is_file():
                self.put(f"{prefix}{path.relative_to(folder).as_posix()}", path.read_bytes())

    def delete(self, keys):
        with suppress(FileNotFoundError):
            obstore.delete(self._opened(), list(keys))

    def close(self):
        self.proxy.close()
