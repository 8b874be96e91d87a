"""Groups that an earlier run sent into a bucket are kept only if the files they came from had been compared."""

from types import SimpleNamespace

import pytest

from shardctl.base.dtype import BY_NAME
from shardctl.base.workers import NullWatcher, StopRequest
from shardctl.conversion.bucket_output import ShareSender
from shardctl.conversion.engine.part import WorkerPart, encode_part, parse_part
from shardctl.storage import FileStat
from shardctl.tensors.box import Box
from shardctl.tensors.manifest import Chunk, Region

U8 = BY_NAME["U8"]
COPY = SimpleNamespace(reads=(Chunk(Box.whole((100,)), U8, Region("a.safetensors", 0, (1,)), "w"),))
SHARE = SimpleNamespace(plan=SimpleNamespace(copies=(COPY,), want=SimpleNamespace(files={"out": None})))


def sender(monkeypatch, proved, *, promised, allow=False):
    part = WorkerPart({"out": 100}, {}, {}, {}, {}, {}, proved=proved, written_bytes=100)
    source = SimpleNamespace(promised=promised, files=lambda: {"a.safetensors": FileStat(100, "v")})
    checkpoint = SimpleNamespace(source=source, allow_unverified=allow)
    work = SimpleNamespace(checkpoint=checkpoint, plan=SimpleNamespace(copies=(COPY,)), allow_overflow=False)
    monkeypatch.setattr(ShareSender, "_sent", lambda *_: "sent again")
    uploads = SimpleNamespace(group=lambda _: part)
    made = ShareSender(work, {}, None, uploads, NullWatcher(), StopRequest(), False)
    made._progress.open(100, 1)
    return made


@pytest.mark.parametrize(
    ("proved", "promised", "allow", "kept"),
    [
        ((), {"a.safetensors"}, False, False),
        (("b.safetensors",), {"a.safetensors"}, False, False),
        (("a.safetensors",), {"a.safetensors"}, False, True),
        ((), set(), False, True),
        ((), {"a.safetensors"}, True, True),
    ],
    ids=["not compared", "another was", "compared", "no hash is promised", "allowed"],
)
def test_a_group_is_kept_if_its_source_was_proved(monkeypatch, proved, promised, allow, kept):
    found = sender(monkeypatch, proved, promised=promised, allow=allow)._group(0, SHARE)
    assert (found != "sent again") is kept


def test_a_part_says_what_was_proved_when_it_was_done():
    part = WorkerPart({"out": 1}, {}, {}, {}, {}, {}, proved=("a", "b"))
    found, _ = parse_part(encode_part(part, {}), {})
    assert found.proved == ("a", "b")
