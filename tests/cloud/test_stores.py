"""Every kind of store, as source, as destination and as both: the bytes that a directory has."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest
from cloud_models import llama, on_disk

from shardctl.base.errors import ChangedError, DestinationError
from shardctl.conversion.engine.uploads import BucketUploads
from shardctl.options import DestinationOptions, ReshardOptions, VerifyOptions
from shardctl.storage.cloud.bucket import PIECE, CloudBucket
from shardctl.storage.cloud.settings import QUICK
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.diff import diff
from shardctl.verbs.digest import digest
from shardctl.verbs.inspect import inspect
from shardctl.verbs.plan import plan
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

TP2 = ReshardOptions(mesh=Mesh.of(tp=2), threads=2)


@pytest.fixture
def source(tmp_path):
    return llama(tmp_path / "source")


@pytest.fixture
def heavy(tmp_path):
    """One whose files are sent in several parts."""
    return llama(tmp_path / "heavy", vocab_size=200_000)


def test_a_store_gets_the_bytes_that_a_directory_gets(place, source, tmp_path):
    wanted = reshard(source, tmp_path / "out", TP2, destination_options=DestinationOptions(checksums="sha256"))
    done = reshard(source, place.address("a/out"), TP2, destination_options=DestinationOptions(checksums="sha256"))
    assert place.held("a/out/") == on_disk(tmp_path / "out")
    assert done.record == wanted.record


def test_files_in_several_parts_arrive_whole(place, heavy, tmp_path):
    reshard(heavy, tmp_path / "out", TP2)
    reshard(heavy, place.address("out"), TP2)
    assert max(map(len, place.held("out/").values())) > PIECE
    assert place.held("out/") == on_disk(tmp_path / "out")


def test_a_store_is_read_like_a_directory(place, source, tmp_path):
    place.fill("models/llama/", source)
    address = place.address("models/llama")
    assert digest(address).digest == digest(source).digest
    assert inspect(address).carried == inspect(source).carried
    assert plan(address, TP2).weight_bytes == plan(source, TP2).weight_bytes
    assert diff(address, source).changes == ()
    there, here = reshard(address, tmp_path / "there", TP2), reshard(source, tmp_path / "here", TP2)
    assert on_disk(tmp_path / "there").keys() == on_disk(tmp_path / "here").keys()
    assert there.record.digest == here.record.digest
    assert verify(address, VerifyOptions(against=source)).ok
    assert digest(f"{address}/model.safetensors").digest == digest(source).digest


def test_from_a_store_into_the_same_store(place, source):
    reshard(source, place.address("cut"), TP2)
    back = reshard(place.address("cut"), place.address("back"), ReshardOptions(to="hf"))
    assert back.record.digest == digest(source).digest


def test_an_object_that_changes_under_the_reader_is_an_error(place, source):
    place.fill("m/", source)
    bucket = CloudBucket(place.address("m"))
    etag = bucket.objects()["model.safetensors"].etag
    assert bucket.head("model.safetensors").etag == etag, "a listing and a look speak of one object"
    content = bytearray((source / "model.safetensors").read_bytes())
    into = bytearray(100)
    bucket.fetch("model.safetensors", 8, memoryview(into), etag)
    assert into == content[8:108]
    content[-1] ^= 1
    place.put("m/model.safetensors", bytes(content))
    with pytest.raises(ChangedError, match="the object has changed"):
        bucket.fetch("model.safetensors", 8, memoryview(into), etag)


def test_what_is_not_there_can_be_removed(place):
    place.put("x/there", b"1")
    CloudBucket(place.address("x"), writing=True).delete(["there", "gone"])
    assert place.keys("x/") == set()


def test_a_bucket_that_is_not_there_is_the_destinations_fault(place, source):
    with pytest.raises(DestinationError, match="nothing is there") as refused:
        reshard(source, f"{place.scheme}://no-such-bucket/out", TP2)
    assert refused.value.hint == "make the bucket first, or check its name"


KILLS = 2


def test_a_process_that_is_killed_leaves_nothing_that_looks_finished_and_the_next_one_goes_on(place, heavy, tmp_path):
    """A short kill grid; docs/benchmarks/faults_buckets.py has the long one."""
    reshard(heavy, tmp_path / "wanted", TP2)
    wanted = on_disk(tmp_path / "wanted")
    command = [sys.executable, "-m", "shardctl", "reshard", str(heavy), place.address("out"), "--tp", "2"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    generator = random.Random(14)
    points = sorted(generator.sample(range(4, 16), KILLS))
    for requests in points:
        place.proxy.requests.clear()
        run = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        while run.poll() is None and len(place.proxy.requests) < requests:
            time.sleep(0.002)
        run.send_signal(signal.SIGKILL)
        run.communicate()
        assert "out/shardctl.json" not in place.keys("out/"), f"killed after {requests} requests"
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert place.held("out/") == wanted


def begun_together(monkeypatch, other):
    """Lets another run go on between the moment when this one has looked, and the one when it notes its plan."""
    create, left = CloudBucket.create, [other]

    def overtaken(*args):
        if left:
            left.pop()()
        return create(*args)

    monkeypatch.setattr(CloudBucket, "create", overtaken)


def stop_before_publishing(source, address):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(BucketUploads, "publish", lambda *_: (_ for _ in ()).throw(DestinationError("stopped")))
        with pytest.raises(DestinationError, match="stopped"):
            reshard(source, address, TP2)


def test_of_two_runs_that_begin_at_once_one_is_refused(place, source, tmp_path, monkeypatch):
    reshard(source, tmp_path / "out", TP2)
    begun_together(monkeypatch, lambda: stop_before_publishing(source, place.address("out")))
    with pytest.raises(DestinationError, match="was taken by another run"):
        reshard(source, place.address("out"), ReshardOptions(to="hf"))
    reshard(source, place.address("out"), TP2)
    assert place.held("out/") == on_disk(tmp_path / "out")


def test_a_checkpoint_that_is_finished_in_the_meantime_is_not_replaced(place, source, tmp_path, monkeypatch):
    reshard(source, tmp_path / "out", TP2)
    begun_together(monkeypatch, lambda: reshard(source, place.address("out"), TP2))
    with pytest.raises(DestinationError, match="was taken by another run"):
        reshard(source, place.address("out"), ReshardOptions(to="hf"))
    assert place.held("out/") == on_disk(tmp_path / "out")


def test_two_runs_with_one_plan_write_the_same(place, source, tmp_path, monkeypatch):
    reshard(source, tmp_path / "out", TP2)
    begun_together(monkeypatch, lambda: stop_before_publishing(source, place.address("out")))
    reshard(source, place.address("out"), TP2)
    assert place.held("out/") == on_disk(tmp_path / "out")


def test_a_store_without_conditional_writes_is_written_to(open_place, source, tmp_path):
    place, refused, tries = open_place("s3"), [], QUICK["max_retries"] + 1

    def unimplemented(method, path):
        if method == "PUT" and path.endswith("plan.json") and len(refused) < tries:
            refused.append(path)
            return 501, b"<Error><Code>NotImplemented</Code></Error>"
        return None

    place.proxy.fault = unimplemented
    reshard(source, tmp_path / "out", TP2)
    reshard(source, place.address("out"), TP2)
    assert place.held("out/") == on_disk(tmp_path / "out")
    assert len(refused) == tries
