"""Two runs that write to one place in a bucket: one result is whole, and nothing of the other run is left."""

import random
import threading
import time

import pytest
from cloud_models import llama, on_disk

from shardctl.base.errors import DestinationError
from shardctl.options import DestinationOptions, ReshardOptions
from shardctl.storage.cloud.bucket import CloudBucket
from shardctl.tensors.mesh import Mesh
from shardctl.tensors.record import parse_record
from shardctl.verbs.reshard import reshard

COMMANDS = {
    "tp2": ReshardOptions(mesh=Mesh.of(tp=2), threads=1, max_shard_size=30_000),
    "tp2 in bf16": ReshardOptions(mesh=Mesh.of(tp=2), threads=1, max_shard_size=30_000, dtype="bf16"),
    "hf": ReshardOptions(to="hf", threads=1, max_shard_size=30_000),
}
"""The first two have the same names of objects, with other content."""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return llama(tmp_path_factory.mktemp("two") / "source")


@pytest.fixture(scope="module")
def wanted(source, tmp_path_factory):
    """What each command makes in a directory."""
    made = {}
    for name, options in COMMANDS.items():
        place = tmp_path_factory.mktemp("made") / "out"
        reshard(source, place, options)
        made[name] = on_disk(place)
    return made


@pytest.fixture
def s3_place(open_place, monkeypatch):
    monkeypatch.setattr("shardctl.conversion.bucket_output.measure_free_space", lambda _: 100_000)  # several groups
    place = open_place("s3")
    place.proxy.turns = threading.Lock()  # moto looks at a condition and writes in two steps, which a store must not
    return place


def begin(source, place, name, said, **options):
    """A run in a thread of its own; `said` gets what became of it."""

    def work():
        try:
            reshard(source, place.address("out"), COMMANDS[name], destination_options=DestinationOptions(**options))
            said[name] = ""
        except DestinationError as error:
            said[name] = error.message

    thread = threading.Thread(target=work)
    thread.start()
    return thread


@pytest.mark.parametrize("other", ["hf", "tp2 in bf16"])
def test_what_the_loser_has_on_its_way_is_not_in_the_result(s3_place, source, wanted, monkeypatch, other):
    """The later run takes the place while an upload of the earlier one goes on, and waits before it publishes."""
    upload, held_up, go_on, said = CloudBucket.upload, threading.Event(), threading.Event(), {}

    def slow(self, path, *rest):
        if threading.current_thread() is first and not go_on.is_set():
            held_up.set()
            go_on.wait(60)
        return upload(self, path, *rest)

    monkeypatch.setattr(CloudBucket, "upload", slow)
    first = begin(source, s3_place, "tp2", said)
    assert held_up.wait(60)
    second = begin(source, s3_place, other, said)
    second.join(2)
    assert "out/shardctl.json" not in s3_place.keys("out/"), "published while another run was sending"
    go_on.set()
    first.join()
    second.join()
    assert said.keys() == {"tp2", other}
    assert "was taken by another run" in said["tp2"]
    assert said[other] == ""
    assert s3_place.held("out/") == wanted[other]


def test_what_arrives_after_the_winner_gave_the_loser_up_is_removed_by_the_loser(s3_place, source, wanted, monkeypatch):
    """As if the loser were on another machine, and stood still for longer than anybody waits."""
    monkeypatch.setattr("shardctl.conversion.engine.bucket_claim.GRACE_SECONDS", 0)
    upload, others = CloudBucket.upload, []

    def late(self, path, *rest):
        if not others:
            others.append(None)
            reshard(source, s3_place.address("out"), COMMANDS["hf"])
        return upload(self, path, *rest)

    monkeypatch.setattr(CloudBucket, "upload", late)
    with pytest.raises(DestinationError, match="was taken by another run"):
        reshard(source, s3_place.address("out"), COMMANDS["tp2"])
    assert s3_place.held("out/") == wanted["hf"]


def test_a_run_that_has_begun_to_publish_is_not_overtaken(s3_place, source, wanted, monkeypatch):
    """All of the first run's objects are there, and its record is about to be written."""
    write, others = CloudBucket.write, []

    def overtaken(self, path, content):
        if path == "shardctl.json" and not others:
            others.append(None)
            with pytest.raises(DestinationError, match="already holds a finished checkpoint"):
                reshard(source, s3_place.address("out"), COMMANDS["hf"])
        return write(self, path, content)

    monkeypatch.setattr(CloudBucket, "write", overtaken)
    reshard(source, s3_place.address("out"), COMMANDS["tp2"])
    assert s3_place.held("out/") == wanted["tp2"]


@pytest.mark.wrong_result
def test_what_a_user_put_there_in_the_meantime_is_left_alone(s3_place, source, wanted, monkeypatch):
    """Even under a name that the run whose place was taken would have written."""
    upload, taken = CloudBucket.upload, []

    def overtaken(self, path, *rest):
        if not taken:
            taken.append(None)
            raise DestinationError("the network is gone")
        s3_place.put("out/notes.txt", b"mine")
        s3_place.put(f"out/{foreign}", b"mine, too")
        return upload(self, path, *rest)

    foreign = min(wanted["tp2"].keys() - wanted["hf"].keys())
    monkeypatch.setattr(CloudBucket, "upload", overtaken)
    with pytest.raises(DestinationError, match="network"):
        reshard(source, s3_place.address("out"), COMMANDS["tp2"])
    reshard(source, s3_place.address("out"), COMMANDS["hf"])
    assert s3_place.held("out/") == {**wanted["hf"], "notes.txt": b"mine", foreign: b"mine, too"}


@pytest.mark.parametrize("kind", ["s3", "az", "gs"])
def test_an_object_that_another_run_replaces_is_read_whole(open_place, monkeypatch, kind):
    """Each look at the object is followed by another content, as when two runs note their plans."""
    bucket, look = CloudBucket(open_place(kind).address("out"), writing=True), CloudBucket.head
    bucket.write("plan.json", b"first")

    def overtaken(self, path):
        found = look(self, path)
        self.write(path, b"second")
        return found

    monkeypatch.setattr(CloudBucket, "head", overtaken)
    content, found = bucket.read_object("plan.json")
    assert look(bucket, "plan.json") == found
    assert found.size == len(content)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.wrong_result  # read while the other run replaces it
def test_races_end_with_one_whole_result_or_none(s3_place, source, wanted, overwrite):
    """Seeded rounds; docs/benchmarks/faults_buckets.py has many, with processes that are killed."""
    generator = random.Random(31 + overwrite)
    for _ in range(2):
        s3_place.delete(s3_place.keys("out/"))
        if overwrite:
            reshard(source, s3_place.address("out"), COMMANDS["hf"])
        said, names = {}, generator.sample(sorted(COMMANDS), 2)
        threads = []
        for name in names:
            threads.append(begin(source, s3_place, name, said, overwrite=overwrite))
            time.sleep(generator.random())
        for thread in threads:
            thread.join()
        found = s3_place.held("out/")
        if "shardctl.json" in found:
            assert found in wanted.values(), (said, sorted(found))
            assert all(found == wanted[name] for name, error in said.items() if not error)
            assert parse_record(found["shardctl.json"]).files.keys() | {"shardctl.json"} == found.keys()
        assert said.keys() == set(names)
