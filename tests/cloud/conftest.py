"""An S3 server on loopback, Azure's emulator and a small Google store; and a bucket of its own for each test."""

import itertools
import logging

import pytest

pytest.importorskip("obstore", reason="obstore is not installed")
pytest.importorskip("moto.server", reason="moto's server is not installed")

from azurite import missing
from stores import KINDS, StorePlace

_numbers = itertools.count()
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "x",
    "AWS_SECRET_ACCESS_KEY": "y",
    "AWS_REGION": "us-east-1",
    "AWS_DEFAULT_REGION": "us-east-1",
}


@pytest.fixture(scope="session")
def endpoint():
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3(endpoint, monkeypatch):
    """Amazon's own client; the environment is the one that both it and shardctl read."""
    import boto3

    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    return boto3.client("s3")


@pytest.fixture
def bucket(s3):
    name = f"bucket-{next(_numbers)}"
    s3.create_bucket(Bucket=name)
    return name


@pytest.fixture(scope="session")
def running():
    """The stores that tests asked for, by scheme."""
    found = {}
    yield found
    for store in found.values():
        store.close()


@pytest.fixture
def open_place(running, tmp_path, monkeypatch):
    """Opens a bucket of its own in a store of a kind, with the environment in which shardctl finds it."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    opened = []

    def opens(scheme):
        if scheme == "az" and missing():
            pytest.skip(missing())
        if scheme not in running:
            running[scheme] = KINDS[scheme]()
        place = StorePlace(scheme, running[scheme], tmp_path)
        opened.append(place)
        for name, value in place.environment.items():
            monkeypatch.setenv(name, value)
        return place

    yield opens
    for place in opened:
        place.close()


@pytest.fixture(params=sorted(KINDS))
def place(request, open_place):
    """A bucket of each kind in turn."""
    return open_place(request.param)
