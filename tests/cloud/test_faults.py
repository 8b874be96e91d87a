"""What a store's network does to a conversion: what passes is tried again, and what does not is said as it is."""

import pytest
from cloud_models import llama, on_disk
from fault_proxy import LOST

from shardctl.base.errors import AccessError, DestinationError, SourceError, TransientError
from shardctl.options import ReshardOptions
from shardctl.storage import retries as patience
from shardctl.storage.cloud.bucket import CloudBucket
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.digest import digest
from shardctl.verbs.reshard import reshard

TP2 = ReshardOptions(mesh=Mesh.of(tp=2), threads=2)


@pytest.fixture(autouse=True)
def _hurried(monkeypatch):
    """Waits between tries are short."""
    monkeypatch.setattr(patience, "FIRST_WAIT", 0.01)


@pytest.fixture
def source(tmp_path):
    return llama(tmp_path / "source")


@pytest.fixture
def heavy(tmp_path):
    """One whose files are sent in several parts."""
    return llama(tmp_path / "heavy", vocab_size=200_000)


@pytest.fixture
def s3_place(open_place):
    return open_place("s3")


def times(count, fault, matches):
    """A fault that befalls the first requests that match."""
    left = [count]

    def asked(method, path):
        if matches(method, path) and left[0]:
            left[0] -= 1
            return fault
        return None

    return asked


def completes(method, path):
    """Whether a request makes one object of the parts that were sent."""
    return (method == "POST" and "uploadId=" in path) or (method == "PUT" and "comp=blocklist" in path)


def refusal(code, more="", status=400):
    return status, f"<?xml version='1.0'?>\n<Error><Code>{code}</Code><Message>no</Message>{more}</Error>".encode()


def uploads(place):
    """How often sending an object in parts was begun; Azure has no request for that."""
    return sum(method == "POST" and "uploads" in path for method, path in place.proxy.requests)


def test_an_object_whose_last_answer_is_lost_is_there(place, heavy, tmp_path):
    """S3 and Google forget the upload that they have completed, and answer 404 to the library's own second try."""
    reshard(heavy, tmp_path / "out", TP2)
    answers = [LOST] + [refusal("NoSuchUpload", status=404)] * (place.scheme != "az")
    place.proxy.fault = lambda method, path: answers.pop(0) if answers and completes(method, path) else None
    reshard(heavy, place.address("out"), TP2)
    assert answers == []
    assert place.held("out/") == on_disk(tmp_path / "out")
    assert place.scheme == "az" or uploads(place) == 2, "nothing was sent twice"


def test_an_upload_that_the_store_forgot_is_sent_again(s3_place, heavy, tmp_path):
    reshard(heavy, tmp_path / "out", TP2)
    s3_place.proxy.fault = times(1, refusal("NoSuchUpload", status=404), completes)
    reshard(heavy, s3_place.address("out"), TP2)
    assert s3_place.held("out/") == on_disk(tmp_path / "out")
    assert uploads(s3_place) == 3


@pytest.mark.parametrize("code", ["RequestTimeout", "IncompleteBody", "BadDigest"])
def test_a_400_that_is_the_networks_fault_is_tried_again(s3_place, source, code):
    s3_place.proxy.fault = times(2, refusal(code), lambda method, path: method == "PUT" and "safetensors" in path)
    done = reshard(source, s3_place.address("out"), TP2)
    assert done.record.digest == digest(source).digest


@pytest.mark.parametrize("said", ["in the answer", "by the bucket", "by nobody"])
@pytest.mark.parametrize("writing", [False, True])
def test_a_wrong_region_names_the_right_one(s3_place, source, said, writing):
    region = {} if said == "by nobody" else {"x-amz-bucket-region": "eu-west-3"}

    def elsewhere(*_):
        if said == "in the answer":
            return (*refusal("AuthorizationHeaderMalformed", "<Region>eu-west-3</Region>"), region)
        return (301, b"", region)

    s3_place.proxy.fault = elsewhere
    address = s3_place.address("out")
    with pytest.raises(DestinationError if writing else SourceError, match=r"is in .*region") as refused:
        reshard(source, address, TP2) if writing else digest(address)
    right = "set AWS_REGION to the bucket's region" if said == "by nobody" else "set AWS_REGION=eu-west-3"
    assert refused.value.hint == right
    assert "not in us-east-1" in refused.value.message
    assert len(s3_place.proxy.requests) <= 2, "it will not pass, and is not tried again"


WRITES = {"PUT", "POST", "DELETE"}


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (refusal("InvalidRequest"), DestinationError),
        (refusal("NoSuchBucket", status=404), DestinationError),
        (refusal("MethodNotAllowed", status=405), DestinationError),
        (refusal("AccessDenied", status=403), AccessError),
        (refusal("InternalError", status=500), TransientError),
        (refusal("RequestTimeout"), TransientError),
        (LOST, TransientError),
    ],
    ids=["400", "404", "405", "403", "500", "RequestTimeout", "no answer"],
)
@pytest.mark.parametrize("after", [0, 1, 3])
def test_trouble_while_writing_is_never_the_sources_fault(s3_place, source, fault, error, after, monkeypatch):
    monkeypatch.setattr("shardctl.storage.cloud.settings.QUICK", {"max_retries": 0})
    seen = []

    def failing(method, path):
        if method in WRITES:
            seen.append(path)
        return fault if len(seen) > after and method in WRITES else None

    s3_place.proxy.fault = failing
    with pytest.raises(error) as refused:
        reshard(source, s3_place.address("out"), TP2)
    assert refused.value.exit_code in {5, 6, 7}
    assert refused.value.hint
    assert "out/shardctl.json" not in s3_place.keys("out/")


@pytest.mark.parametrize("code", [400, 404])
def test_a_look_at_the_destination_that_fails_is_the_destinations_fault(s3_place, source, code):
    s3_place.proxy.fault = lambda *_: refusal("NoSuchBucket" if code == 404 else "Bad", status=code)
    with pytest.raises(DestinationError):
        reshard(source, s3_place.address("out"), TP2)


def test_an_object_that_somebody_else_wrote_is_the_destinations_fault(s3_place, source, monkeypatch):
    upload = CloudBucket.upload

    def overtaken(self, path, file, size):
        head = self.head
        monkeypatch.setattr(self, "head", lambda path: (s3_place.put(f"out/{path}", bytes(size)), head(path))[1])
        return upload(self, path, file, size)

    monkeypatch.setattr(CloudBucket, "upload", overtaken)
    with pytest.raises(DestinationError, match="was written by another program"):
        reshard(source, s3_place.address("out"), TP2)


def test_a_store_that_cannot_be_opened_is_said_at_once(source, monkeypatch):
    for name in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_USE_EMULATOR"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(AccessError, match="cannot be opened") as refused:
        reshard(source, "az://container/out", TP2)
    assert "AZURE_STORAGE_ACCOUNT_NAME" in refused.value.hint
