"""No server keeps a run for ever, or has it read without end, or gets a token that is not for it."""

import time

import hub_server as server
import pytest
from hub_models import model
from hub_server import HubServer, status
from huggingface_hub import constants

from shardctl.base.errors import HostileError, ShardctlError, SourceError, TransientError
from shardctl.storage.addresses import open_source
from shardctl.storage.hub import limits, questions, sockets
from shardctl.verbs.inspect import inspect

NAME = "someone/llama"
SHARD = "model-00001-of-00003.safetensors"


@pytest.fixture(autouse=True)
def short(hub, monkeypatch):
    """Tenths of seconds in place of minutes."""
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.3)
    monkeypatch.setattr(limits, "PACE_TIMEOUTS", 1)
    hub.add(NAME, model())


def read(path, size):
    open_source(NAME).read_at(path, 0, memoryview(bytearray(size)))


@pytest.mark.parametrize("path", [SHARD, "config.json"], ids=["from the store", "from the Hub"])
@pytest.mark.parametrize("fault", [server.trickle, server.only_interim], ids=["a byte now and then", "100 Continue"])
def test_what_comes_too_slowly_is_passing_trouble(hub, monkeypatch, path, fault):
    for module in (limits, questions, sockets):
        monkeypatch.setattr(module, "ANSWER_TIMEOUTS", 1)
    monkeypatch.setattr("shardctl.storage.hub.ranges.ANSWER_TIMEOUTS", 1)
    hub.fail("cdn" if path == SHARD else "resolve", *[fault] * 20)
    began = time.monotonic()
    with pytest.raises(TransientError, match=r"only .* bytes came in|no answer was complete|the connection failed"):
        read(path, 200)
    assert time.monotonic() - began < 15


def test_a_stall_that_is_short_is_forgiven(hub):
    def stalls(handler, content, *_):
        time.sleep(0.2)
        handler.give(content)

    hub.fail("cdn", stalls)
    read(SHARD, 100_000)
    assert len(hub.asked("cdn")) == 1


@pytest.mark.parametrize("number", [404, 403, 500, 302])
@pytest.mark.parametrize("route", ["info", "tree", "resolve"])
def test_bodies_of_errors_and_redirects_are_not_read_without_end(hub, route, number):
    hub.fail(route, *[server.without_end(number, Location=f"{hub.url}/{NAME}")] * 30)
    with pytest.raises(ShardctlError) as raised:
        inspect(NAME)
    assert raised.value.exit_code in {4, 5, 7}
    assert hub.sent["poured"] < 60e6, "a megabyte of each, and what was on its way"


def test_a_listing_without_end_is_an_error(hub):
    hub.fail("tree", server.without_end(200))
    with pytest.raises(SourceError, match="has no content, or more than"):
        inspect(NAME)
    assert hub.sent["poured"] < 60e6


CIRCLES = {"itself": "{hub}{path}", "one that is gone": "{hub}/api/models/someone/llama/tree/main?cursor=7"}


@pytest.mark.parametrize("link", CIRCLES.values(), ids=CIRCLES)
def test_pages_in_a_circle_are_an_error(hub, link):
    hub.fail("tree", *[server.next_page(link)] * 99)
    with pytest.raises(SourceError, match="names one before it as the next"):
        inspect(NAME)
    assert len(hub.asked("tree")) <= 3


def test_pages_without_end_are_an_error(hub, monkeypatch):
    monkeypatch.setattr(questions, "_MOST_PAGES", 10)
    hub.fail("tree", *[server.next_page("{hub}{path}1")] * 99)
    with pytest.raises(SourceError, match="more than 10 pages"):
        inspect(NAME)


def test_the_token_is_not_sent_to_another_host(hub, monkeypatch):
    """A page of a listing, and a redirect, that lead elsewhere are refused before anything is asked there."""
    other = HubServer()
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    try:
        for route, fault in {
            "tree": server.next_page(f"{other.url}/api/models/{NAME}/tree/main?cursor=1"),
            "info": status(307, Location=f"{other.url}/api/models/{NAME}/revision/main"),
        }.items():
            hub.fail(route, fault)
            with pytest.raises(HostileError, match="another host, which must not see the token") as refused:
                inspect(NAME)
            assert refused.value.exit_code == 4
        assert other.connections == 0
    finally:
        other.close()


NO_PAGES = [b"{}", b"[1]", b'[{"type": "file"}]', b'[{"type": "file", "path": "a"}]', b"[" * 100_000]


@pytest.mark.parametrize("page", NO_PAGES, ids=lambda page: page[:30].decode())
def test_a_listing_that_is_none_is_an_error(hub, page):
    hub.fail("tree", *[lambda handler, *_: handler.answer(200, page)] * 3)
    with pytest.raises((SourceError, TransientError)):
        inspect(NAME)
