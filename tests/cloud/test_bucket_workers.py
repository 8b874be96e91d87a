"""Several workers into one bucket, and a checkpoint in a bucket that is replaced: the bytes that one machine makes."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest
from cloud_models import llama, on_disk
from safetensors.numpy import load_file, save_file

from shardctl.base.errors import DestinationError, Mismatch, SourceError
from shardctl.conversion.engine.uploads import BucketUploads
from shardctl.conversion.engine.worker import WorkerId
from shardctl.conversion.worker_part import contribute
from shardctl.options import DestinationOptions, ReshardOptions, VerifyOptions
from shardctl.storage.cloud import bucket as cloud_bucket
from shardctl.storage.cloud.bucket import CloudBucket
from shardctl.tensors.mesh import Mesh
from shardctl.tensors.record import ATTESTATION
from shardctl.verbs.finish import finish
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

COUNT = 3
TP2 = ReshardOptions(mesh=Mesh.of(tp=2), threads=1, max_shard_size=30_000)
SMALL = ReshardOptions(to="hf", max_shard_size=30_000, threads=1)
ONE = ReshardOptions(to="hf", threads=1)


@pytest.fixture
def source(tmp_path):
    return llama(tmp_path / "source")


@pytest.fixture
def s3_place(open_place):
    return open_place("s3")


def work(source, place, number, reshard_options=TP2, **options):
    return contribute(
        source,
        place.address("out"),
        reshard_options,
        worker=WorkerId(number, COUNT),
        destination_options=DestinationOptions(**options),
    )


def all_work(source, place, order=range(COUNT), **options):
    return [work(source, place, number, **options) for number in order]


def result(place):
    return place.held("out/")


def names(place):
    """What is visible of a checkpoint: all but what is below `.shardctl/`."""
    return {key.removeprefix("out/") for key in place.keys("out/") if not key.startswith("out/.shardctl/")}


@pytest.mark.parametrize(
    ("reshard_options", "order"),
    [(TP2, (2, 1, 0)), (SMALL, (0, 1, 2)), (ReshardOptions(to="dcp", threads=1), (1, 2, 0))],
    ids=["tp2", "hf", "dcp"],
)
def test_workers_in_any_order_make_what_one_machine_makes(s3_place, source, tmp_path, reshard_options, order):
    wanted = reshard(
        source, tmp_path / "one", reshard_options, destination_options=DestinationOptions(checksums="sha256")
    )
    done = all_work(source, s3_place, order, reshard_options=reshard_options, checksums="sha256")
    assert [len(each.missing) for each in done] == [2, 1, 0]
    assert "shardctl.json" not in names(s3_place)
    made = finish(s3_place.address("out"))
    assert (made.workers, made.record) == (COUNT, wanted.record)
    assert result(s3_place) == on_disk(tmp_path / "one")
    assert finish(s3_place.address("out")).workers == 0, "to finish twice is harmless"


def test_every_kind_of_store_has_workers(place, source, tmp_path):
    reshard(source, tmp_path / "one", TP2)
    all_work(source, place)
    finish(place.address("out"))
    assert result(place) == on_disk(tmp_path / "one")


def test_nothing_that_a_loader_looks_for_is_there_before_all_are_done(s3_place, source):
    all_work(source, s3_place, reshard_options=SMALL)
    assert all(name.endswith(".safetensors") for name in names(s3_place))


def test_finish_says_who_is_missing_and_changes_nothing(s3_place, source):
    with pytest.raises(SourceError, match="no worker has begun"):
        finish(s3_place.address("out"))
    work(source, s3_place, 1)
    before = result(s3_place)
    with pytest.raises(Mismatch, match=r"2 of 3 workers .*: 0/3, 2/3"):
        finish(s3_place.address("out"))
    assert result(s3_place) == before


def test_a_worker_that_is_done_says_so_and_one_whose_object_is_gone_mends_it(s3_place, source, tmp_path):
    reshard(source, tmp_path / "one", TP2)
    all_work(source, s3_place)
    assert work(source, s3_place, 1).done_before
    s3_place.put(f"out/{min(n for n in names(s3_place) if n.startswith('shard-00001'))}", b"tampered with")
    with pytest.raises(Mismatch):
        finish(s3_place.address("out"))
    all_work(source, s3_place)
    finish(s3_place.address("out"))
    assert result(s3_place) == on_disk(tmp_path / "one")


def test_a_cast_that_overflows_is_refused_although_an_earlier_run_that_allowed_it_has_sent_it(
    s3_place, source, monkeypatch
):
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"][:3] = 1e5
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    fp16, address = ReshardOptions(dtype="fp16", threads=1, max_shard_size=30_000), s3_place.address("out")
    allowed = DestinationOptions(allow_overflow=True)
    with pytest.raises(SourceError, match="finite values become infinite in F16"):
        reshard(source, address, fp16)
    assert "shardctl.json" not in names(s3_place)
    with monkeypatch.context() as patched:
        patched.setattr(BucketUploads, "publish", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            reshard(source, address, fp16, destination_options=allowed)
    with pytest.raises(SourceError, match="finite values become infinite in F16"):
        reshard(source, address, fp16)
    made = reshard(source, address, fp16, destination_options=allowed)
    assert (made.record.options["allow_overflow"], made.written_bytes) == ("true", 0)


def test_a_worker_started_anew_forgets_what_it_had(s3_place, source, tmp_path):
    reshard(source, tmp_path / "one", TP2)
    all_work(source, s3_place)
    assert not work(source, s3_place, 1, no_resume=True).done_before
    finish(s3_place.address("out"))
    assert result(s3_place) == on_disk(tmp_path / "one")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"reshard_options": SMALL}, "another plan"),
        ({"checksums": "sha256"}, "another choice of --hash"),
        ({"overwrite": True}, "another choice of --overwrite"),
    ],
)
def test_two_plans_for_one_destination_are_refused(s3_place, source, options, said):
    work(source, s3_place, 0)
    with pytest.raises(DestinationError, match=said):
        work(source, s3_place, 1, **options)
    with pytest.raises(DestinationError, match="is being written by several workers"):
        reshard(source, s3_place.address("out"), SMALL)


def test_what_an_interrupted_machine_left_makes_way_for_workers(s3_place, source, tmp_path, monkeypatch):
    reshard(source, tmp_path / "one", TP2)
    with monkeypatch.context() as patched:
        patched.setattr(BucketUploads, "publish", lambda *_: (_ for _ in ()).throw(DestinationError("x")))
        with pytest.raises(DestinationError):
            reshard(source, s3_place.address("out"), SMALL)
    all_work(source, s3_place)
    finish(s3_place.address("out"))
    assert result(s3_place) == on_disk(tmp_path / "one")


def test_a_finished_checkpoint_is_replaced_when_the_new_one_is_complete(place, source, tmp_path, monkeypatch):
    reshard(source, place.address("out"), SMALL)
    old = result(place)
    seen, publish = [], BucketUploads.publish
    monkeypatch.setattr(BucketUploads, "publish", lambda *args: (seen.append(result(place)), publish(*args))[1])
    with pytest.raises(DestinationError, match="already holds a finished checkpoint") as refused:
        reshard(source, place.address("out"), ONE)
    assert "--overwrite" in refused.value.hint
    done = reshard(source, place.address("out"), ONE, destination_options=DestinationOptions(overwrite=True))
    assert {key: value for key, value in seen[0].items() if not key.startswith(".shardctl/")} == old
    assert any("may have read part of a checkpoint" in warning for warning in done.warnings)
    reshard(source, tmp_path / "one", ONE)
    assert result(place) == on_disk(tmp_path / "one")
    assert verify(place.address("out"), VerifyOptions(against=source)).ok


def test_workers_replace_a_finished_checkpoint_too(s3_place, source, tmp_path):
    reshard(source, tmp_path / "one", TP2)
    reshard(source, s3_place.address("out"), SMALL)
    old = names(s3_place)
    all_work(source, s3_place, overwrite=True)
    assert names(s3_place) == old
    assert finish(s3_place.address("out")).warnings
    assert result(s3_place) == on_disk(tmp_path / "one")


def test_what_is_not_of_the_checkpoint_is_not_removed(s3_place, source):
    reshard(source, s3_place.address("out"), SMALL)
    for name in ATTESTATION:  # which goes with what it was of
        s3_place.put(f"out/{name}", b"of the old one")
    reshard(source, s3_place.address("out"), SMALL, destination_options=DestinationOptions(overwrite=True))
    assert ATTESTATION.isdisjoint(result(s3_place))
    s3_place.put("out/thesis.txt", b"years of work")
    with pytest.raises(DestinationError, match=r"more than the checkpoint that would be replaced: thesis\.txt"):
        reshard(source, s3_place.address("out"), ONE, destination_options=DestinationOptions(overwrite=True))


def test_objects_that_a_store_does_not_copy_pass_through_this_machine(s3_place, source, tmp_path, monkeypatch):
    monkeypatch.setattr(cloud_bucket, "_COPIED_BY_STORE", {"s3": 1000})
    monkeypatch.setattr(cloud_bucket, "PIECE", 5 << 20)
    source = llama(tmp_path / "heavy", vocab_size=80_000)
    reshard(source, s3_place.address("out"), SMALL)
    reshard(source, s3_place.address("out"), ONE, destination_options=DestinationOptions(overwrite=True))
    reshard(source, tmp_path / "one", ONE)
    assert result(s3_place) == on_disk(tmp_path / "one")


class Killed(BaseException):
    """No code of ours runs any more."""


def killed_at(monkeypatch, step):
    """From the call of that number on, nothing that changes the bucket is done; returns the calls."""
    calls = []

    def dying(name):
        usual = getattr(CloudBucket, name)

        def act(self, *args):
            calls.append((name, args[0]))
            if len(calls) > step:
                raise Killed
            return usual(self, *args)

        return act

    for name in ("write", "upload", "copy", "delete"):
        monkeypatch.setattr(CloudBucket, name, dying(name))
    return calls


def steps(monkeypatch, act):
    """How many calls change the bucket."""
    with monkeypatch.context() as patched:
        calls = killed_at(patched, 1 << 30)
        act()
    return len(calls)


def sound(place, old, new):
    """Whether what is seen is the old checkpoint, the new one, or has no record."""
    seen = {key: value for key, value in result(place).items() if not key.startswith(".shardctl/")}
    return seen in (old, new) or "shardctl.json" not in seen


@pytest.mark.parametrize("by", ["one machine", "workers"])
def test_a_replacement_that_is_killed_at_any_step_is_carried_on(s3_place, source, tmp_path, monkeypatch, by):
    reshard(source, tmp_path / "old", SMALL)
    reshard(source, tmp_path / "new", ONE)
    old, new = on_disk(tmp_path / "old"), on_disk(tmp_path / "new")

    def again():
        if by == "workers":
            all_work(source, s3_place, reshard_options=ONE, overwrite=True)
            finish(s3_place.address("out"))
        else:
            reshard(source, s3_place.address("out"), ONE, destination_options=DestinationOptions(overwrite=True))

    def fresh():
        s3_place.delete(s3_place.keys("out/"))
        s3_place.fill("out/", tmp_path / "old")

    fresh()
    total = steps(monkeypatch, again)
    assert result(s3_place) == new
    for step in sorted(random.Random(15).sample(range(total // 2, total), 5)):
        fresh()
        with monkeypatch.context() as patched:
            calls = killed_at(patched, step)
            with pytest.raises(Killed):
                again()
        assert sound(s3_place, old, new), calls[-2:]
        try:
            again()
        except DestinationError as error:  # the workers' result was published already, and only notes were left
            assert "already holds the finished checkpoint of these workers" in error.message  # noqa: PT017
            finish(s3_place.address("out"))
        assert result(s3_place) == new, calls[-2:]


def test_workers_that_are_killed_go_on_and_nothing_looks_finished(s3_place, source, tmp_path):
    """Real processes and a real SIGKILL, at seeded moments; docs/benchmarks/faults_buckets.py has the long form."""
    reshard(source, tmp_path / "one", TP2)
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "shardctl", "reshard", str(source), s3_place.address("out"), "--tp", "2"]
    command += ["--max-shard-size", "30kB", "--threads", "1"]
    generator = random.Random(15)
    for number in range(2):
        after = generator.randrange(3, 12)  # requests
        s3_place.proxy.requests.clear()
        run = subprocess.Popen([*command, "--worker", f"{number}/2"], env=environment, stderr=subprocess.PIPE)
        while run.poll() is None and len(s3_place.proxy.requests) < after:
            time.sleep(0.002)
        run.send_signal(signal.SIGKILL)
        run.communicate()
        assert "shardctl.json" not in names(s3_place)
    finishing = [sys.executable, "-m", "shardctl", "finish", s3_place.address("out")]
    assert subprocess.run(finishing, env=environment, capture_output=True, check=False).returncode in {3, 4}
    for number in range(2):
        subprocess.run([*command, "--worker", f"{number}/2"], env=environment, capture_output=True, check=True)
    subprocess.run(finishing, env=environment, capture_output=True, check=True)
    assert verify(s3_place.address("out"), VerifyOptions(against=source)).ok
    assert names(s3_place) == result(s3_place).keys()
