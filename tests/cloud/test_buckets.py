"""Buckets as source, as destination and as both: the bytes that a directory has, or nothing that looks finished."""

import os
import signal
import subprocess
import sys
import time

import pytest
from cloud_models import held, llama, on_disk, put, unfinished

from shardctl.base.errors import ChangedError, DestinationError, Interrupted, SourceError, UsageError
from shardctl.base.workers import NullWatcher
from shardctl.conversion.engine.replacement import replaced_by
from shardctl.conversion.engine.uploads import BucketUploads
from shardctl.options import DestinationOptions, ReshardOptions, SourceOptions, VerifyOptions
from shardctl.storage import retries as patience
from shardctl.storage.cloud.bucket import PIECE, CloudBucket
from shardctl.storage.cloud.refusals import RefusalReader
from shardctl.storage.retries import TroubleError
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.diff import diff
from shardctl.verbs.digest import digest
from shardctl.verbs.dry_run import rehearse_reshard
from shardctl.verbs.inspect import inspect
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


@pytest.mark.parametrize(
    "reshard_options",
    [
        TP2,
        ReshardOptions(to="hf", max_shard_size=30_000),
        ReshardOptions(to="hf", dtype="bf16"),
        ReshardOptions(to="dcp"),
        ReshardOptions(mesh=Mesh.of(fsdp=3)),
    ],
    ids=["tp2", "hf in files", "cast", "dcp", "fsdp3"],
)
def test_a_bucket_gets_the_bytes_that_a_directory_gets(s3, bucket, source, tmp_path, reshard_options):
    wanted = reshard(
        source, tmp_path / "out", reshard_options, destination_options=DestinationOptions(checksums="sha256")
    )
    done = reshard(
        source, f"s3://{bucket}/a/out", reshard_options, destination_options=DestinationOptions(checksums="sha256")
    )
    assert held(s3, bucket, "a/out/") == on_disk(tmp_path / "out")
    assert done.record == wanted.record
    assert unfinished(s3, bucket) == []


def test_a_bucket_is_read_like_a_directory(s3, bucket, source, tmp_path):
    put(s3, bucket, "models/llama/", source)
    address = f"s3://{bucket}/models/llama"
    assert digest(address).digest == digest(source).digest
    assert inspect(address).carried == inspect(source).carried
    assert diff(address, source).changes == ()
    there, here = reshard(address, tmp_path / "there", TP2), reshard(source, tmp_path / "here", TP2)
    assert on_disk(tmp_path / "there").keys() == on_disk(tmp_path / "here").keys()
    assert there.record.digest == here.record.digest
    assert verify(address, VerifyOptions(against=source)).ok
    assert digest(f"{address}/model.safetensors").digest == digest(source).digest


def test_sums_and_deltas_of_a_bucket_are_those_of_a_directory(s3, bucket, source, tmp_path):
    """Other inputs in the bucket, too, and a destination there that is one of them."""
    other = reshard(source, tmp_path / "other", ReshardOptions(dtype="bf16")).destination
    again = reshard(other, tmp_path / "again", ReshardOptions(dtype="fp32")).destination
    for name, place in (("source", source), ("again", again)):
        put(s3, bucket, f"{name}/", place)
    address = f"s3://{bucket}"
    here = reshard(source, tmp_path / "sum", ReshardOptions(to="hf", average_with=(str(again),)))
    there = reshard(f"{address}/source", f"{address}/sum", ReshardOptions(to="hf", average_with=(f"{address}/again",)))
    assert there.record.digest == here.record.digest
    assert held(s3, bucket, "sum/")["model.safetensors"] == on_disk(tmp_path / "sum")["model.safetensors"]
    over = DestinationOptions(overwrite=True)
    for target in ("sum", "again"):
        options = ReshardOptions(to="hf", average_with=(f"{address}/again",))
        with pytest.raises(DestinationError):
            reshard(f"{address}/sum", f"{address}/{target}", options, destination_options=over)
    diff(f"{address}/source", f"{address}/again", write=tmp_path / "weight_v000001")
    put(s3, bucket, "delta/", tmp_path / "weight_v000001")
    applied = SourceOptions(apply=(f"{address}/delta",))
    reshard(f"{address}/source", f"{address}/new", ReshardOptions(to="hf"), source_options=applied)
    assert digest(f"{address}/new").digest == digest(again).digest
    with pytest.raises(DestinationError):
        reshard(source, f"{address}/delta", destination_options=over, source_options=applied)


def test_from_a_bucket_into_a_bucket(s3, bucket, source, tmp_path):
    reshard(source, f"s3://{bucket}/cut", TP2)
    back = reshard(f"s3://{bucket}/cut", f"s3://{bucket}/back", ReshardOptions(to="hf"))
    assert back.record.digest == digest(source).digest
    wanted = reshard(source, tmp_path / "cut", TP2)
    reshard(tmp_path / "cut", tmp_path / "back", ReshardOptions(to="hf"))
    assert held(s3, bucket, "back/").keys() == on_disk(tmp_path / "back").keys()
    assert held(s3, bucket, "back/")["model.safetensors"] == on_disk(tmp_path / "back")["model.safetensors"]
    assert wanted.record.digest == back.record.digest


def order(monkeypatch):
    """The keys in the order in which objects were put."""
    written = []
    upload, write = CloudBucket.upload, CloudBucket.write
    monkeypatch.setattr(
        CloudBucket, "upload", lambda self, path, *rest: (written.append(path), upload(self, path, *rest))[1]
    )
    monkeypatch.setattr(
        CloudBucket, "write", lambda self, path, *rest: (written.append(path), write(self, path, *rest))[1]
    )
    return written


def test_what_makes_a_checkpoint_comes_last(s3, bucket, source, monkeypatch):
    written = order(monkeypatch)
    reshard(source, f"s3://{bucket}/out", ReshardOptions(to="hf", max_shard_size=30_000))
    plain = [path for path in written if not path.startswith(".shardctl/")]
    assert plain[-2:] == ["config.json", "shardctl.json"]
    weights = [n for n, path in enumerate(plain) if path.endswith(".safetensors")]
    assert max(weights) < plain.index("model.safetensors.index.json")
    assert not any(path.startswith(".shardctl/") for path in held(s3, bucket, "out/"))


def test_an_upload_that_is_interrupted_leaves_no_object_and_the_same_command_goes_on(
    s3, bucket, heavy, tmp_path, monkeypatch
):
    wanted = reshard(heavy, tmp_path / "out", TP2)
    pieces, sent = CloudBucket._read_pieces, []

    def interrupted(self, file, piece):
        for part in pieces(self, file, piece):
            sent.append(len(part))
            if len(sent) == 3:
                self.stop.signal = signal.SIGTERM
            yield part

    with monkeypatch.context() as patched:
        patched.setattr(CloudBucket, "_read_pieces", interrupted)
        with pytest.raises(Interrupted) as raised:
            reshard(heavy, f"s3://{bucket}/out", TP2)
    assert raised.value.exit_code == 143
    assert sum(sent) > PIECE
    assert [path for path in held(s3, bucket, "out/") if not path.startswith(".shardctl/")] == []
    assert unfinished(s3, bucket) == [], "the parts that were sent are given up"
    done = reshard(heavy, f"s3://{bucket}/out", TP2)
    assert done.record == wanted.record
    assert held(s3, bucket, "out/") == on_disk(tmp_path / "out")


class Told(NullWatcher):
    """Which files were done, of how many."""

    def begin(self, total_bytes, files=0, phase=""):  # noqa: ARG002 - the protocol has it
        self.count, self.files = files, []

    def file_done(self, path):
        self.files.append(path)


def test_objects_that_an_earlier_run_finished_are_kept(s3, bucket, source, tmp_path, monkeypatch):
    reshard_options = ReshardOptions(to="hf", max_shard_size=30_000, threads=1)
    wanted = reshard(source, tmp_path / "out", reshard_options)
    upload, sent = CloudBucket.upload, []

    def failing(self, path, *rest):
        if len(sent) == 3:
            raise DestinationError("the network is gone")
        sent.append(path)
        return upload(self, path, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(CloudBucket, "upload", failing)
        with pytest.raises(DestinationError, match="network"):
            reshard(source, f"s3://{bucket}/out", reshard_options)
    assert "shardctl.json" not in held(s3, bucket, "out/")
    s3.put_object(Bucket=bucket, Key=f"out/{sent[0]}", Body=b"tampered with")
    written, told = order(monkeypatch), Told()
    done = reshard(source, f"s3://{bucket}/out", reshard_options, progress=told)
    assert len(set(told.files)) == told.count
    assert sent[0] in written
    assert not {sent[1], sent[2]} & set(written)
    assert 0 < done.kept_bytes < wanted.written_bytes
    assert done.record == wanted.record
    assert held(s3, bucket, "out/") == on_disk(tmp_path / "out")


@pytest.mark.parametrize("edited", [True, False], ids=["edited in place", "chmod"])
def test_groups_whose_source_was_touched_are_compared_before_they_are_kept(
    s3, bucket, source, tmp_path, monkeypatch, edited
):
    """An edit in place keeps the size, the modification time and the inode of a file."""
    reshard_options = ReshardOptions(to="hf", max_shard_size=30_000, threads=1)
    with monkeypatch.context() as patched:
        patched.setattr("shardctl.conversion.bucket_output.measure_free_space", lambda _: 50_000)
        patched.setattr(BucketUploads, "publish", lambda *_: killed())
        with pytest.raises(RuntimeError):
            reshard(source, f"s3://{bucket}/out", reshard_options)
        weights, before = source / "model.safetensors", (source / "model.safetensors").stat()
        if edited:
            data = bytearray(weights.read_bytes())
            data[-1] ^= 1
            with weights.open("r+b") as file:
                file.write(data)
            os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
        else:
            weights.chmod(0o600)
        patched.undo()
        patched.setattr("shardctl.conversion.bucket_output.measure_free_space", lambda _: 50_000)
        written = order(patched)
        done = reshard(source, f"s3://{bucket}/out", reshard_options)
    reshard(source, tmp_path / "out", reshard_options)
    assert held(s3, bucket, "out/") == on_disk(tmp_path / "out")
    shards = {path for path in done.record.files if path.endswith(".safetensors")}
    sent = shards & set(written)
    assert len(sent) == edited
    assert len(shards) > 2


@pytest.mark.parametrize("order", [1, -1], ids=["less room then", "more room then"])
def test_an_earlier_run_may_have_had_another_room_for_groups(s3, bucket, source, tmp_path, monkeypatch, order):
    wanted = reshard(source, tmp_path / "out", TP2)
    one_file = max(size for path, size in wanted.record.files.items() if path.endswith(".safetensors")) + 1
    before, now = [one_file, 1 << 30][::order]
    upload = BucketUploads.upload
    with monkeypatch.context() as patched:
        patched.setattr("shardctl.conversion.bucket_output.measure_free_space", lambda _: before)
        patched.setattr(BucketUploads, "upload", lambda self, n, *rest: upload(self, n, *rest) if n < 1 else 1 / 0)
        with pytest.raises(ZeroDivisionError):
            reshard(source, f"s3://{bucket}/out", TP2)
    assert ".shardctl/group-00000" in held(s3, bucket, "out/")
    monkeypatch.setattr("shardctl.conversion.bucket_output.measure_free_space", lambda _: now)
    assert reshard(source, f"s3://{bucket}/out", TP2).record == wanted.record
    assert held(s3, bucket, "out/") == on_disk(tmp_path / "out")


def test_folders_that_were_made_in_a_web_page_are_no_files(s3, bucket, source):
    put(s3, bucket, "m/", source)
    for folder in ("m/", "m/sub/", "m/1_Pooling/"):
        s3.put_object(Bucket=bucket, Key=folder, Body=b"")
    s3.put_object(Bucket=bucket, Key="m/empty.txt", Body=b"")
    s3.put_object(Bucket=bucket, Key="m/.cache/huggingface/download/config.json.metadata", Body=b"x")
    there = reshard(f"s3://{bucket}/m", f"s3://{bucket}/out", TP2)
    assert {"sub", "1_Pooling"}.isdisjoint(there.record.files)
    assert not any(path.startswith(".cache") for path in there.record.files)
    assert {"empty.txt", "1_Pooling/config.json"} <= there.record.files.keys()


def test_what_another_program_wrote_meanwhile_is_noticed(s3, bucket, source, monkeypatch):
    reshard_options, publish = ReshardOptions(to="hf", max_shard_size=30_000), BucketUploads.publish

    def beaten(self, record, sizes):
        path = min(path for path in sizes if path.endswith(".safetensors"))
        s3.put_object(Bucket=bucket, Key=f"out/{path}", Body=bytes(sizes[path]))
        publish(self, record, sizes)

    with monkeypatch.context() as patched:
        patched.setattr(BucketUploads, "publish", beaten)
        with pytest.raises(DestinationError, match="was changed by another program"):
            reshard(source, f"s3://{bucket}/out", reshard_options)
    assert "shardctl.json" not in held(s3, bucket, "out/")
    assert reshard(source, f"s3://{bucket}/out", reshard_options).record.digest == digest(source).digest


def killed(*_):
    raise RuntimeError("killed")


@pytest.mark.parametrize("left", [0, 1], ids=["all notes", "the plan"])
def test_a_run_that_was_killed_when_all_was_there_is_found_finished(s3, bucket, source, tmp_path, monkeypatch, left):
    """The record is written, and notes are not yet removed."""
    wanted = reshard(source, tmp_path / "out", TP2)
    delete, removed = CloudBucket.delete, []
    with monkeypatch.context() as patched:
        patched.setattr(
            CloudBucket, "delete", lambda *args: removed.append(delete(*args)) if len(removed) < left else killed()
        )
        with pytest.raises(RuntimeError):
            reshard(source, f"s3://{bucket}/out", TP2)
    assert {"shardctl.json", ".shardctl/plan.json"} <= held(s3, bucket, "out/").keys()
    with pytest.raises(DestinationError, match="already holds a finished checkpoint"):
        reshard(source, f"s3://{bucket}/out", ReshardOptions(to="hf"))
    again = reshard(source, f"s3://{bucket}/out", TP2)
    assert (again.record, again.written_bytes, again.kept_bytes) == (wanted.record, 0, wanted.written_bytes)
    assert held(s3, bucket, "out/") == on_disk(tmp_path / "out")


PLAN = b'{"schema": "shardctl.uploads/2", "files": %s, "held": [], "replaces": %s}'


@pytest.mark.parametrize(
    "content",
    [
        *(b"{", b"[]", b"{}", b"null", b"[" * 100_000, b'{"schema": "shardctl.uploads/1", "files": 7}'),
        *(PLAN % (b"[[1]]", b"null"), PLAN % (b"[]", b'{"files": 3}'), PLAN % (b"[]", b'{"etag": {}}')),
    ],
    ids=lambda content: content.decode()[:80],
)
def test_a_plan_that_was_damaged_is_said(s3, bucket, source, content):
    s3.put_object(Bucket=bucket, Key="out/.shardctl/plan.json", Body=content)
    with pytest.raises(DestinationError, match=r"plan\.json is damaged: ") as refused:
        reshard(source, f"s3://{bucket}/out", TP2)
    assert refused.value.hint == f"remove everything in s3://{bucket}/out"


@pytest.mark.parametrize(
    "content",
    [
        *(b"{", b"[]", b"null", b'{"record": 3, "staged": {}, "replaces": {}}'),
        *(b'{"record": "", "staged": {"a": "b"}, "replaces": {}}', b'{"record": "", "staged": [], "replaces": {}}'),
        b'{"record": "", "staged": {}, "replaces": {"files": 3}}',
    ],
    ids=lambda content: content.decode(),
)
def test_a_note_of_a_replacement_that_was_damaged_is_said(s3, bucket, content):
    s3.put_object(Bucket=bucket, Key="out/.shardctl/publishing.json", Body=content)
    with pytest.raises(DestinationError, match=r"publishing\.json is damaged: ") as refused:
        replaced_by(CloudBucket(f"s3://{bucket}/out", writing=True))
    assert refused.value.hint == f"remove everything in s3://{bucket}/out"


def test_what_another_command_has_finished_meanwhile_is_left_alone(s3, bucket, source, monkeypatch):
    reshard_options, upload, others = ReshardOptions(to="hf", max_shard_size=30_000), BucketUploads.upload, []

    def overtaken(self, number, part, tree):
        if number == 1 and not others:
            others.append(None)
            reshard(source, f"s3://{bucket}/out", ReshardOptions(to="hf", dtype="bf16", max_shard_size=30_000))
            others.append(held(s3, bucket, "out/"))
        return upload(self, number, part, tree)

    monkeypatch.setattr(BucketUploads, "upload", overtaken)
    with pytest.raises(DestinationError, match="was taken by another run"):
        reshard(source, f"s3://{bucket}/out", reshard_options)
    assert held(s3, bucket, "out/") == others[1]


def test_what_another_command_left_is_removed(s3, bucket, source, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(
            "shardctl.conversion.engine.uploads.BucketUploads.publish",
            lambda *_: (_ for _ in ()).throw(DestinationError("x")),
        )
        with pytest.raises(DestinationError):
            reshard(source, f"s3://{bucket}/out", ReshardOptions(to="hf", max_shard_size=30_000))
    reshard(source, f"s3://{bucket}/out", TP2)
    reshard(source, tmp_path / "out", TP2)
    assert held(s3, bucket, "out/") == on_disk(tmp_path / "out")


def test_a_process_that_is_killed_in_the_middle_leaves_nothing_that_looks_finished(s3, bucket, heavy, tmp_path):
    wanted = reshard(heavy, tmp_path / "out", TP2)
    command = [sys.executable, "-m", "shardctl", "reshard", str(heavy), f"s3://{bucket}/out", "--tp", "2"]
    run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=os.environ.copy())
    deadline = time.monotonic() + 90
    while not unfinished(s3, bucket) and run.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    run.kill()
    run.communicate()
    found = held(s3, bucket, "out/")
    assert "shardctl.json" not in found
    assert "config.json" not in found
    assert all(on_disk(tmp_path / "out")[path] == content for path, content in found.items() if path[0] != "."), "torn"
    assert reshard(heavy, f"s3://{bucket}/out", TP2).record == wanted.record
    assert held(s3, bucket, "out/") == on_disk(tmp_path / "out")


def test_a_destination_that_is_not_ours_is_refused(s3, bucket, source):
    s3.put_object(Bucket=bucket, Key="mine/thesis.txt", Body=b"")
    for verb in (reshard, rehearse_reshard):
        with pytest.raises(DestinationError, match=r"not empty and was not written by shardctl: it holds thesis.txt"):
            verb(source, f"s3://{bucket}/mine", TP2)
    reshard(source, f"s3://{bucket}/out", TP2)
    with pytest.raises(DestinationError, match="already holds a finished checkpoint"):
        reshard(source, f"s3://{bucket}/out", ReshardOptions(to="hf"))
    assert reshard(source, f"s3://{bucket}/out", TP2).done_before
    with pytest.raises(DestinationError, match="is the source itself or inside it"):
        reshard(f"s3://{bucket}/out", f"s3://{bucket}/out/in", TP2)
    with pytest.raises(DestinationError, match="contains the source"):
        reshard(f"s3://{bucket}/out", f"s3://{bucket}", TP2)


def test_a_rehearsal_writes_nothing(s3, bucket, source):
    rehearse_reshard(source, f"s3://{bucket}/out", TP2)
    assert held(s3, bucket) == {}


@pytest.mark.usefixtures("s3")
def test_what_is_not_there_is_said(bucket, source):
    with pytest.raises(SourceError, match="does not exist"):
        digest(f"s3://{bucket}/nothing")
    with pytest.raises(SourceError, match="nothing is there"):
        digest("s3://no-such-bucket/model")
    with pytest.raises(DestinationError, match="no-such-bucket"):
        reshard(source, "s3://no-such-bucket/model", TP2)
    for wrong in ("s3://", "s3:///x", f"s3://{bucket}/../x"):
        with pytest.raises(UsageError, match="is not an address in a bucket"):
            digest(wrong)


def test_an_object_that_changes_under_the_reader_is_an_error(s3, bucket, heavy):
    put(s3, bucket, "m/", heavy)
    place = CloudBucket(f"s3://{bucket}/m")
    etag = place.objects()["model.safetensors"].etag
    content = bytearray((heavy / "model.safetensors").read_bytes())
    into = bytearray(100)
    place.fetch("model.safetensors", 8, memoryview(into), etag)
    assert into == content[8:108]
    content[-1] ^= 1
    s3.put_object(Bucket=bucket, Key="m/model.safetensors", Body=bytes(content))
    with pytest.raises(ChangedError, match="the object has changed"):
        place.fetch("model.safetensors", 8, memoryview(into), etag)


def test_trouble_that_passes_is_tried_again_and_answers_are_measured(s3, bucket, source, monkeypatch):
    put(s3, bucket, "m/", source)
    monkeypatch.setattr(patience, "FIRST_WAIT", 0.01)
    place = CloudBucket(f"s3://{bucket}/m")
    library, calls = place._obstore, []
    get = library.get

    class Short:
        def __init__(self, answer, cut):
            self.range, self._data = answer.range, bytes(answer.bytes())[: -cut or None]

        def bytes(self):
            return self._data

    def flaky(store, key, options):
        calls.append(options["range"])
        if len(calls) == 1:
            raise library.exceptions.GenericError("the connection was reset")
        return Short(get(store, key, options=options), cut=1 if len(calls) == 2 else 0)

    monkeypatch.setattr(library, "get", flaky)
    into = bytearray(50)
    place.fetch("model.safetensors", 4, memoryview(into), "")
    assert into == (source / "model.safetensors").read_bytes()[4:54]
    assert calls == [(4, 54)] * 3


def test_small_reads_are_merged(s3, bucket, tmp_path, monkeypatch):
    source = llama(tmp_path / "source", num_hidden_layers=12)
    put(s3, bucket, "m/", source)
    fetched = []
    fetch = CloudBucket.fetch
    monkeypatch.setattr(
        CloudBucket,
        "fetch",
        lambda self, path, offset, into, etag: (fetched.append(len(into)), fetch(self, path, offset, into, etag))[1],
    )
    digest(f"s3://{bucket}/m")
    size = (source / "model.safetensors").stat().st_size
    tensors = len(inspect(source).tensors)
    assert len(fetched) < tensors / 4
    assert sum(fetched) < 1.5 * size + 200_000


def test_a_key_that_is_no_path_is_named(s3, bucket):
    s3.put_object(Bucket=bucket, Key="m/./z", Body=b"1")
    with pytest.raises(SourceError, match=r"a key in it is not a path: .*\./z") as refused:
        CloudBucket(f"s3://{bucket}/m").objects()
    assert refused.value.hint == "rename that object, or remove it"


def test_the_words_of_another_error_do_not_make_it_one_of_a_path():
    from obstore import exceptions

    refusals = RefusalReader("s3://bucket", writing=False, library=exceptions)
    passing = refusals.explain_error(exceptions.GenericError("connection reset by /x/invalid path/y"), "reading")
    assert isinstance(passing, TroubleError)


def test_without_obstore_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setitem(sys.modules, "obstore.exceptions", None)
    with pytest.raises(UsageError) as raised:
        CloudBucket("s3://x/y")
    assert raised.value.hint == "pip install 'obstore>=0.6'"
