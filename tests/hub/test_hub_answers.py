"""Settings and answers with which no model can be read: each is told as what it is, never as a bug."""

import sys

import pytest
from huggingface_hub import close_session

from shardctl.base.errors import SourceError, TransientError, UsageError
from shardctl.base.workers import StopRequest
from shardctl.storage.hub import open_hub
from shardctl.storage.hub.address import HubAddress
from shardctl.storage.hub.listing import list_repository
from shardctl.storage.hub.publishing import HubRepository

ENTRY = {"type": "file", "path": "config.json", "size": 2, "oid": "0" * 40}


@pytest.mark.parametrize("name", ["HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT"])
@pytest.mark.parametrize("value", ["abc", "1.5", "-1", "1e3", "9" * 30, "nan", "10s"])
def test_a_timeout_that_the_library_cannot_be_imported_with(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=f"{name} is '{value}', which is not a number of seconds"):
        open_hub("me/model")


@pytest.mark.parametrize("value", ["", " ", "0", "30", " 30 "])
def test_a_timeout_that_it_can(monkeypatch, hub, value):
    hub.add("me/model", {"config.json": b"{}"})
    monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", value)
    open_hub("me/model").close()


def listing(hub, *entries):
    hub.add("me/model", {"config.json": b"{}"})
    hub.fail("tree", *[lambda handler, *_: handler.json(list(entries))] * 3)
    return list_repository(HubAddress("me/model"), StopRequest())


@pytest.mark.parametrize("size", [2**63, 2**64, 10**30, -1, 0.5, "2", None])
def test_a_size_that_no_file_has(hub, size):
    with pytest.raises(SourceError, match=r"lists 'config\.json' with a size of"):
        listing(hub, ENTRY | {"size": size})


def test_the_largest_size_there_is(hub):
    assert listing(hub, ENTRY | {"size": 2**63 - 1}).files["config.json"].size == 2**63 - 1


@pytest.mark.parametrize("path", ["a\ud800b", "\udcff"])
def test_a_name_that_is_not_unicode(hub, path):
    with pytest.raises(SourceError, match="not Unicode text"):
        listing(hub, ENTRY | {"path": path})


@pytest.mark.parametrize(
    "change", [{"path": 3}, {"oid": 3}, {"oid": None}, {"lfs": {"oid": 3, "size": 2, "pointerSize": 1}}]
)
def test_what_is_not_text_where_text_is_expected(hub, change):
    with pytest.raises(SourceError, match="whose name is not text"):
        listing(hub, ENTRY | change)


@pytest.mark.parametrize("missing", ["type", "path", "size", "oid"])
def test_an_entry_without_what_every_entry_has(hub, missing):
    with pytest.raises(TransientError, match="not in the form of the Hub"):
        listing(hub, {key: value for key, value in ENTRY.items() if key != missing})


@pytest.mark.parametrize("entry", [3, None, "x", [], [[]]])
def test_an_entry_that_is_none(hub, entry):
    with pytest.raises(TransientError, match="not in the form of the Hub"):
        listing(hub, entry)


@pytest.mark.parametrize("value", ["http://[", "huggingface.co", "ftp://x", "http://x:99999", "http://", "http://a b"])
@pytest.mark.parametrize("read", [True, False], ids=["source", "destination"])
def test_an_endpoint_that_is_no_address(monkeypatch, value, read):
    monkeypatch.setenv("HF_ENDPOINT", value)
    with pytest.raises(UsageError, match=r"HF_ENDPOINT is .*, which is not the address of a server"):
        open_hub("me/model") if read else HubRepository(HubAddress.parse("hf://me/model"))


@pytest.mark.parametrize("name", ["ALL_PROXY", "HTTPS_PROXY"])
@pytest.mark.usefixtures("hub")
def test_a_socks_proxy_without_its_package(monkeypatch, name):
    monkeypatch.setitem(sys.modules, "socksio", None)
    monkeypatch.setenv(name, "socks5://127.0.0.1:1")
    close_session()
    try:
        with pytest.raises(UsageError, match="needs the package socksio") as raised:
            open_hub("me/model")
    finally:
        close_session()
    assert raised.value.hint is not None
    assert "pip install socksio" in raised.value.hint


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    ("name", "value"),
    [("SSL_CERT_FILE", "/none"), ("HTTPS_PROXY", "abc://x"), ("HTTP_PROXY", "\n"), ("HTTP_PROXY", "caf\udce9")],
)
def test_a_setting_with_which_no_connection_can_be_made(monkeypatch, name, value):
    close_session()
    monkeypatch.setenv(name, value)
    try:
        with pytest.raises(UsageError, match="cannot make connections"):
            open_hub("me/model")
    finally:
        close_session()
