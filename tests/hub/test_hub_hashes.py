"""A file of the Hub that is read whole has the hash that was promised, or the run fails, whatever goes wrong."""

import io
import json

import hub_server as server
import numpy as np
import pytest
from hub_models import CONFIG, content, model, write
from hub_server import status
from safetensors.numpy import save

from shardctl.base.errors import ChangedError, SourceError, TransientError
from shardctl.options import ReshardOptions, SourceOptions
from shardctl.storage import file_hashes
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.digest import digest
from shardctl.verbs.reshard import reshard

NAME = "someone/llama"
TP2 = ReshardOptions(mesh=Mesh.of(tp=2))
LARGE = {"hidden_size": 256, "vocab_size": 8192}
"""Of 38 MB, so that a shard takes more than one request."""
TRUSTING = SourceOptions(allow_unverified=True)


@pytest.fixture
def files(hub):
    files = model(**LARGE)
    hub.add(NAME, files)
    return files


def stopped(hub, destination, *first, path):
    """A run that fails with passing trouble after some answers about one file."""
    hub.fail("cdn", *first, *[status(503)] * 99, path=path)
    with pytest.raises(TransientError):
        reshard(NAME, destination, TP2)
    hub._faults.clear()


def shards(files):
    return sorted(path for path in files if path.endswith(".safetensors"))


def test_what_a_run_wrote_before_it_was_stopped_is_read_again_unless_it_was_proved(hub, files, tmp_path):
    """A hash cannot be interrupted: hashlib gives its state to nobody."""
    reshard(write(files, tmp_path / "here"), tmp_path / "right", TP2)
    first = server.sha256(files[shards(files)[0]])
    stopped(hub, tmp_path / "out", None, None, server.flipped_bit, path=first)
    done = reshard(NAME, tmp_path / "out", TP2)
    assert content(tmp_path / "out") == content(tmp_path / "right")
    assert not done.proofs.unverified
    assert set(shards(files)) <= set(done.proofs.verified)


def test_a_file_that_was_proved_is_not_read_again(hub, files, tmp_path):
    one, *others = shards(files)
    stopped(hub, tmp_path / "out", None, None, path=server.sha256(files[others[0]]))
    before = hub.sent["cdn"]
    done = reshard(NAME, tmp_path / "out", TP2)
    assert done.kept_bytes >= len(files[one]) * 0.9
    assert hub.sent["cdn"] - before < sum(len(files[path]) for path in others) * 1.1
    assert done.notes == ("8 files from the Hub, all with the expected hashes",)


def test_with_allow_unverified_everything_is_kept_and_said(hub, files, tmp_path):
    stopped(hub, tmp_path / "out", None, None, None, path=server.sha256(files[shards(files)[0]]))
    done = reshard(NAME, tmp_path / "out", TP2, source_options=TRUSTING)
    assert done.kept_bytes
    assert done.proofs.unverified
    assert all("bytes were read" in reason for reason in done.proofs.unverified.values())
    assert "not compared: model-0000" in done.notes[0]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.usefixtures("files")
def test_a_flipped_bit_is_found_in_a_network_in_trouble(hub, tmp_path, monkeypatch, seed):
    """40 % of the requests fail, and threads wait for one another in vain."""
    monkeypatch.setattr(file_hashes, "_GRACE_PERIOD_SECONDS", 0.0)
    dice = np.random.default_rng(seed)
    faults = [status(503) if dice.random() < 0.4 else None for _ in range(60)]
    place = int(dice.integers(6, 12))
    hub.fail("cdn", *faults[:place], server.flipped_bit, *faults[place:])
    with pytest.raises(ChangedError):
        reshard(NAME, tmp_path / "out", TP2)
    assert not (tmp_path / "out").exists()


def test_a_flipped_bit_is_found_in_what_is_averaged_with_the_source(hub, files, tmp_path):
    local = write(files, tmp_path / "local")
    options = ReshardOptions(average_with=(NAME,))
    done = reshard(local, tmp_path / "fine", options)
    assert "5 files from the Hub, all with the expected hashes" in done.notes
    hub.fail("cdn", None, None, server.flipped_bit, path=server.sha256(files[shards(files)[0]]))
    with pytest.raises(ChangedError):
        reshard(local, tmp_path / "out", options)
    assert not (tmp_path / "out").exists()


def mixed(seed=0):
    """A file whose tensors do not lie in the order of their names: safetensors puts wide types first."""
    random = np.random.default_rng(seed)
    kinds = [np.float16, np.float32, np.float64]
    return {f"t{i:02}": random.standard_normal((64, 2048)).astype(kinds[i % 3]) for i in range(24)}


def test_a_digest_of_mixed_types_reads_each_byte_once_and_hashes_it(hub, tmp_path):
    files = {"model.safetensors": save(mixed(), {"format": "pt"}), "config.json": json.dumps(CONFIG).encode()}
    hub.add("someone/mixed", files)
    done = digest("someone/mixed")
    assert done.digest == digest(write(files, tmp_path / "here")).digest
    assert sorted(done.proofs.verified) == ["config.json", "model.safetensors"]
    assert not done.unverified
    assert hub.sent["cdn"] < len(files["model.safetensors"]) * 1.02


def test_one_wrong_bit_in_a_digest_is_found(hub):
    hub.add("someone/mixed", {"model.safetensors": save(mixed(), {"format": "pt"})})
    hub.fail("cdn", *[None] * 4, server.flipped_bit)
    with pytest.raises(ChangedError, match="its sha256 is"):
        digest("someone/mixed")


def test_archives_are_hashed_although_between_their_records_are_bytes_that_no_tensor_has(hub, tmp_path):
    torch = pytest.importorskip("torch")
    file = io.BytesIO()
    torch.save({f"t{i}": torch.randn(700_000 + i) for i in range(6)}, file)
    hub.add("someone/bin", {"pytorch_model.bin": file.getvalue()})
    done = reshard("someone/bin", tmp_path / "out")
    assert done.proofs.verified == ("pytorch_model.bin",)
    assert hub.sent["cdn"] < len(file.getvalue()) * 1.02 + (200 << 10)
    hub.fail("cdn", *[None] * 9, server.flipped_bit)
    with pytest.raises(ChangedError):
        reshard("someone/bin", tmp_path / "wrong")


def test_what_is_taken_in_part_is_said(files, tmp_path):
    done = reshard(NAME, tmp_path / "out", ReshardOptions(include=r"model\.norm.*"))
    assert sorted(done.proofs.unverified) == shards(files)


def test_a_file_without_a_promised_hash_is_refused_unless_that_is_allowed(hub, files):
    def unpromised(handler, *_):
        entries = [{"type": "file", "path": path, "size": len(data), "oid": ""} for path, data in files.items()]
        handler.json(entries)

    hub.repositories[NAME].large = ()
    hub.fail("tree", unpromised, unpromised)
    with pytest.raises(SourceError, match="the source states no hash for it") as refused:
        digest(NAME)
    assert "--allow-unverified" in refused.value.hint
    done = digest(NAME, source_options=TRUSTING)
    assert done.proofs.verified == ()
    assert len(done.unverified) == 5
