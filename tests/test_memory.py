"""The memory law: what a run says it will need holds, is not far from what it does need, and fits what was allowed.

Anonymous memory is what a process cannot give back without swap; the page cache is the kernel's to drop. It is sampled
from outside while the program runs as users run it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from shardctl.base.dtype import BY_NAME
from shardctl.base.errors import MemoryBudgetError
from shardctl.conversion.engine.budget import INTERPRETER, MIB, PER_CHUNK, PER_TENSOR, PER_THREAD, divide_host_memory
from shardctl.conversion.engine.journal import BandJournal, JournalEntry
from shardctl.libraries.safetensors.header import encode_header
from shardctl.models import describe_model
from shardctl.tensors.box import Box
from shardctl.tensors.copyplan import join_manifests
from shardctl.tensors.digest import DigestSums
from shardctl.tensors.manifest import CheckpointFile, Chunk, Manifest, Region, Tensor, compute_dense_strides

STATUS = "/proc/{}/status"
GENERATOR = Path(__file__).parents[1] / "docs" / "benchmarks" / "generate.py"
linux = pytest.mark.skipif(not Path(STATUS.format("self")).exists(), reason="memory is measured through /proc")


@dataclass
class Measured:
    code: int
    peak: int
    """Bytes of anonymous memory."""
    last: dict
    """The last JSON record."""

    @property
    def projected(self):
        return self.last["projected_memory_bytes"]


def anonymous(pid):
    for line in Path(STATUS.format(pid)).read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    return 0


def measured(*args, verb="reshard"):
    """A verb of `shardctl` with these arguments, watched every few milliseconds."""
    command = [sys.executable, "-m", "shardctl", verb, *map(str, args), "--json"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    peak, over = 0, threading.Event()

    def watch():
        nonlocal peak
        while not over.wait(0.004):
            try:
                peak = max(peak, anonymous(child.pid))
            except OSError:
                return

    watcher = threading.Thread(target=watch)
    watcher.start()
    said, _ = child.communicate(timeout=300)
    over.set()
    watcher.join()
    return Measured(child.returncode, peak, json.loads(said.splitlines()[-1] if verb == "reshard" else said))


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A Llama of 360 MB in bf16."""
    spec = importlib.util.spec_from_file_location("generate", GENERATOR)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    place = tmp_path_factory.mktemp("large")
    module.generate(place, 0.36)
    return place


def llama(place, layers):
    """A Llama with tensors of a few hundred bytes: all there is to it is bookkeeping."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 2,
        "num_hidden_layers": layers,
        "tie_word_embeddings": False,
    }
    (place / "config.json").write_text(json.dumps(config))
    encoded = encode_header(
        [(t.name, BY_NAME["BF16"], t.shape) for t in describe_model(config).own()], {"format": "pt"}
    )
    (place / "model.safetensors").write_bytes(encoded.header + bytes(encoded.size - len(encoded.header)))
    return place


def assert_kept(run, limit, *, spare=1.6):
    assert run.code == 0, run.last
    assert run.peak <= run.projected <= limit
    assert run.projected <= spare * run.peak, "the projection is wasteful"


@linux
@pytest.mark.parametrize(("memory", "threads", "dtype"), [
    (128, 1, "keep"), (128, 4, "fp16"), (256, 2, "fp32"), (256, 4, "keep"), (256, 4, "fp16"),
])  # fmt: skip
def test_the_projection_holds_whatever_the_size_of_the_model(large, tmp_path, memory, threads, dtype):
    run = measured(
        large, tmp_path / "out", "--tp", 4, "--memory", f"{memory}MiB", "--threads", threads, "--dtype", dtype
    )
    assert_kept(run, memory * MIB)


@linux
def test_reading_ranks_and_hashing_stay_within_it(large, tmp_path):
    assert measured(large, tmp_path / "tp4", "--tp", 4).code == 0
    run = measured(tmp_path / "tp4", tmp_path / "tp2", "--tp", 2, "--memory", "200MiB", "--hash", "sha256")
    assert_kept(run, 200 * MIB)


@linux
def test_many_tensors_are_counted(tmp_path):
    tensors = {f"model.layers.{i}.some_module.weight": np.zeros(8, np.float32) for i in range(10_000)}
    source = tmp_path / "source"
    source.mkdir()
    save_file(tensors, source / "model.safetensors")
    run = measured(source, tmp_path / "out", "--threads", 1, "--memory", "112MiB")
    assert_kept(run, 112 * MIB, spare=1.7)


@linux
def test_many_chunks_are_counted(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    run = measured(llama(source, 400), tmp_path / "out", "--tp", 8, "--threads", 1, "--memory", "116MiB")
    assert_kept(run, 116 * MIB, spare=1.7)


@linux
def test_a_limit_that_cannot_hold_it_is_refused_before_anything_is_written(large, tmp_path):
    run = measured(large, tmp_path / "out", "--tp", 4, "--memory", "48MiB")
    assert run.code == 2
    assert "cannot hold this conversion: it needs at least 49 MiB" in run.last["error"]
    assert list(tmp_path.iterdir()) == []


def make_many(place, count):
    """A checkpoint of tensors of one element."""
    place.mkdir()
    arrays = [(f"layers.{n // 1000}.experts.{n % 1000}.weight", BY_NAME["BF16"], (1, 1)) for n in range(count)]
    encoded = encode_header(arrays, {"format": "pt"})
    (place / "model.safetensors").write_bytes(encoded.header + bytes(encoded.size - len(encoded.header)))
    return place


@linux
def test_a_digest_fits_what_is_allowed_whatever_is_large(large, tmp_path):
    usual = measured(large, verb="digest")
    run = measured(large, "--memory", "64MiB", "--threads", 4, verb="digest")
    assert run.last["digest"] == usual.last["digest"]
    assert run.peak < 64 * MIB < usual.peak
    run = measured(make_many(tmp_path / "many", 40_000), "--memory", "112MiB", "--tensors", verb="digest")
    assert run.code == 0
    assert run.peak < 112 * MIB


@linux
def test_statistics_of_values_fit_what_is_allowed_whatever_is_large(tmp_path):
    encoded = encode_header([("large", BY_NAME["BF16"], (1 << 13, 1 << 12))], {"format": "pt"})
    (tmp_path / "large.safetensors").write_bytes(encoded.header)
    os.truncate(tmp_path / "large.safetensors", encoded.size)  # 64 MiB of zeros, without writing them
    many = make_many(tmp_path / "many", 6_000)
    for source, limit in ((tmp_path / "large.safetensors", 64), (many, 80)):
        run = measured(source, "--stats", "--memory", f"{limit}MiB", "--threads", 4, verb="inspect")
        assert run.code == 0
        assert run.peak < limit * MIB
        assert run.last["statistics"]["total"]["zeros"] == run.last["parameters"]


@linux
def test_more_tensors_than_a_digest_may_hold_are_refused_before_anything_is_made_of_them(tmp_path):
    source = make_many(tmp_path / "many", 100_000)
    for limit, said in (("128MiB", "needs more than 144 MiB"), ("160MiB", "needs at least 202 MiB")):
        run = measured(source, "--memory", limit, verb="digest")
        assert run.code == 2
        assert f"--memory {limit} cannot hold this digest: it {said}" in run.last["error"]
        assert run.peak < int(limit[:3]) * MIB


@linux
def test_too_many_tensors_are_counted_before_anything_is_made_of_them(tmp_path):
    """400,000 tensors took 583 MB before they were refused for 256 MiB."""
    source = make_many(tmp_path / "source", 200_000)
    run = measured(source, tmp_path / "out", "--memory", "128MiB")
    assert run.code == 2
    assert "--memory 128MiB cannot hold this conversion" in run.last["error"]
    assert run.peak < 128 * MIB


@linux
def test_a_long_journal_costs_little_to_resume_from(tmp_path):
    """A source of 800 GB in 100,000 bands."""
    writer = """if True:
        from shardctl.tensors.digest import DigestSums
        from shardctl.conversion.engine.journal import BandJournal, JournalEntry
        from pathlib import Path
        sums, path = DigestSums((2**63, 2**63)), Path("journal")
        journal = BandJournal(path, {})
        journal.append([((t, b), JournalEntry(sums, sums)) for t in range(100) for b in range(1000)])
        journal.close()
    """
    subprocess.run([sys.executable, "-c", writer], check=True, cwd=tmp_path)
    before = anonymous("self")
    journal = BandJournal(tmp_path / "journal", {})
    assert len(journal) == 100_000
    assert anonymous("self") - before < 16 * MIB
    sums = DigestSums((2**63, 2**63))
    assert journal.find((99, 999)) == JournalEntry(sums, sums)
    assert journal.find((100, 0)) is None
    journal.close()


def plan(*, have="BF16", want="BF16", tensors=1, chunks=1):
    def manifest(dtype):
        shape, each = (chunks, 64), dtype.nbytes((64,))
        strides = compute_dense_strides(dtype, (1, 64))
        rows = tuple(Chunk(Box((i, 0), (1, 64)), dtype, Region("f", i * each, strides)) for i in range(chunks))
        names = [f"t{i}" for i in range(tensors)]
        return Manifest(
            "x", {n: Tensor(n, dtype, shape, rows) for n in names}, {"f": CheckpointFile("f", chunks * each)}
        )

    return join_manifests(manifest(BY_NAME[have]), manifest(BY_NAME[want]))


def test_blocks_shrink_before_threads_are_given_up():
    roomy = divide_host_memory(plan(), 1 << 30, 4)
    assert (roomy.threads, roomy.block) == (4, 8 * MIB)
    tight = divide_host_memory(plan(), INTERPRETER + 4 * (PER_THREAD + 4 * MIB), 4)
    assert tight.threads == 4
    assert MIB <= tight.block < 8 * MIB
    tighter = divide_host_memory(plan(), INTERPRETER + 2 * (PER_THREAD + 3 * MIB), 4)
    assert tighter.threads == 2
    for found in (roomy, tight, tighter):
        assert found.projected <= found.limit
        assert found.block % 4096 == 0


@pytest.mark.parametrize(("have", "want", "buffers"), [
    ("BF16", "BF16", 2), ("BF16", "F16", 3), ("BF16", "F32", 4), ("F32", "BF16", 2.5),
])  # fmt: skip
def test_a_cast_needs_room_for_its_output_even_at_equal_width(have, want, buffers):
    found = divide_host_memory(plan(have=have, want=want), 1 << 30, 1)
    assert found.per_thread == found.block * buffers + PER_THREAD


def test_bookkeeping_is_reserved_for_every_tensor_and_chunk():
    one, many = divide_host_memory(plan(), 1 << 30, 1), divide_host_memory(plan(tensors=10, chunks=100), 1 << 30, 1)
    assert many.reserved - one.reserved == 9 * PER_TENSOR + (10 * 200 - 2) * PER_CHUNK


def test_a_limit_below_the_smallest_unit_of_work_names_what_is_needed():
    with pytest.raises(MemoryBudgetError, match=r"--memory 40MiB .* at least 49 MiB") as raised:
        divide_host_memory(plan(), 40 * MIB, 8)
    least = 57 * MIB
    assert raised.value.exit_code == 2
    assert divide_host_memory(plan(), least, 8).threads == 1


def test_a_resumed_run_keeps_its_block_and_gives_up_threads_instead():
    wide = divide_host_memory(plan(), 1 << 30, 8)
    narrow = divide_host_memory(plan(), INTERPRETER + 60 * MIB, 8).with_block(wide.block)
    assert narrow.block == wide.block
    assert narrow.threads == 2
    assert narrow.projected <= narrow.limit
    with pytest.raises(MemoryBudgetError, match="interrupted run had blocks"):
        divide_host_memory(plan(), 60 * MIB, 8).with_block(wide.block)


@linux
@pytest.mark.parametrize("first", [b"", b"[[[[", b'{"schema": "'], ids=["no text", "lists", "a long text"])
@pytest.mark.parametrize(("name", "code"), [("journal.jsonl", 0), ("publishing.json", 6)])
def test_a_note_of_an_earlier_run_with_a_first_line_of_half_a_gigabyte(tmp_path, name, code, first):
    source, staging = tmp_path / "source", tmp_path / ".out.shardctl"
    source.mkdir()
    llama(source, 2)
    staging.mkdir()
    with (staging / name).open("wb") as note:
        note.write(first)
        note.truncate(500_000_000)
    found = measured(source, tmp_path / "out")
    assert found.code == code
    assert found.peak < 300 * MIB
