"""Weight deltas of SGLang and slime, against a receiver and a writer made from the format's description."""

import json
import re
import shutil
import struct
import zlib

import blake3
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash
import zstandard
from safetensors import safe_open
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import save_file

import shardctl
from shardctl.base.errors import DestinationError, ShardctlError, SourceError, UnsupportedError, UsageError
from shardctl.cli.program import run as run_program
from shardctl.models import describe_model
from shardctl.options import ReshardOptions, SourceOptions, VerifyOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.diff import diff
from shardctl.verbs.digest import digest
from shardctl.verbs.inspect import inspect
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

INDEX = "model.safetensors.index.json"
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
MODELS = ["bf16", "tied", "fp8", "sharded"]


def checksum(algorithm, data):
    if algorithm == "adler32":
        return f"{zlib.adler32(data):08x}"
    return (xxhash.xxh3_128(data) if algorithm == "xxh3-128" else blake3.blake3(data)).hexdigest()


def list_arrays(place):
    """Every array's file, offset and size in bytes, by its name."""
    found = {}
    for file in sorted(place.glob("*.safetensors")):
        data = file.read_bytes()
        (size,) = struct.unpack("<Q", data[:8])
        for name, said in json.loads(data[8 : 8 + size]).items():
            if name != "__metadata__":
                begin, end = said["data_offsets"]
                found[name] = file, 8 + size + begin, end - begin
    return found


def read_stored(place):
    return {name: f.read_bytes()[at : at + size] for name, (f, at, size) in list_arrays(place).items()}


def write_delta(base, new, parent, version, encoding="xor", algorithm="xxh3-128", *, split=False):
    """What a trainer publishes: the compressed differences of the arrays that changed."""
    place = parent / f"weight_v{version:06d}"
    place.mkdir(parents=True)
    frames, sums = {}, {}
    before, after = read_stored(base), read_stored(new)
    for name, data in after.items():
        old, changed = np.frombuffer(before[name], np.uint8), np.frombuffer(data, np.uint8)
        if np.array_equal(old, changed):
            continue
        at = np.flatnonzero(old != changed).astype("<u4")
        parts = [np.uint32(at.size).tobytes(), at.tobytes(), changed[at].tobytes()]
        raw = (old ^ changed).tobytes() if encoding == "xor" else b"".join(parts)
        frames[name] = np.frombuffer(zstandard.ZstdCompressor(level=1).compress(raw), np.uint8)
        sums[name] = checksum(algorithm, data)
    names = sorted(frames)
    groups = [names[::2], names[1::2]] if split else [names] if names else []
    weight_map = {}
    for number, group in enumerate(groups):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        save_arrays({name: frames[name] for name in group}, place / file, {name: sums[name] for name in group})
        weight_map |= dict.fromkeys(group, file)
    metadata = {
        "version": f"{version:06d}",
        "base_version": f"{version - 1:06d}",
        "delta_encoding": encoding,
        "compression_format": "zstd",
        "checksum_format": algorithm,
    }
    (place / INDEX).write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}))
    return place


def receive(local, delta):
    """What an engine does: patch the arrays in place and compare their checksums."""
    said = json.loads((delta / INDEX).read_text())["metadata"]
    held = list_arrays(local)
    for file in sorted(delta.glob("*.safetensors")):
        with safe_open(file, "numpy") as opened:
            sums, frames = opened.metadata(), {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        for name, frame in frames.items():
            path, at, size = held[name]
            region = np.memmap(path, np.uint8, "r+", at, (size,))
            raw = np.frombuffer(zstandard.ZstdDecompressor().decompressobj().decompress(frame.tobytes()), np.uint8)
            if said["delta_encoding"] == "xor":
                region ^= raw
            else:
                count = int(raw[:4].view("<u4")[0])
                region[raw[4 : 4 + 4 * count].view("<u4")] = raw[4 + 4 * count :]
            assert checksum(said["checksum_format"], region.tobytes()) == sums[name]
            region.flush()


def make_base(place, kind="bf16"):
    torch.manual_seed(1)
    place.mkdir(parents=True)
    config = {**CONFIG, "tie_word_embeddings": kind == "tied", "torch_dtype": "bfloat16"}
    tensors = {t.name: torch.randn(t.shape).bfloat16() for t in describe_model(config).own()}
    if kind == "tied":
        tensors.pop("lm_head.weight", None)
    if kind == "fp8":
        config |= {"quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 16]}}
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            tensors[name] = tensors[name].float().clamp(-4, 4).to(torch.float8_e4m3fn)
            rows, columns = tensors[name].shape
            tensors[f"{name}_scale_inv"] = torch.rand(-(-rows // 16), -(-columns // 16)) + 0.5
    names = sorted(tensors)
    groups = [names[::2], names[1::2]] if kind == "sharded" else [names]
    files = [
        "model.safetensors" if len(groups) == 1 else f"model-{n:05d}-of-{len(groups):05d}.safetensors"
        for n in range(1, len(groups) + 1)
    ]
    for file, group in zip(files, groups, strict=True):
        save_file({name: tensors[name] for name in group}, place / file, {"format": "pt"})
    if len(groups) > 1:
        weight_map = {name: file for file, group in zip(files, groups, strict=True) for name in group}
        (place / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (place / "config.json").write_text(json.dumps(config))
    return place


def train(base, place, seed=0, share=0.1, skip=("model.norm.weight",)):
    """Copy a checkpoint, and change some bytes of most of its arrays."""
    shutil.copytree(base, place)
    random = np.random.default_rng(seed)
    for name, (file, at, size) in list_arrays(place).items():
        if name in skip:
            continue
        region = np.memmap(file, np.uint8, "r+", at, (size,))
        where = np.flatnonzero(random.random(size) < share)[:: 2 if name.endswith("scale_inv") else 1]
        region[where] ^= random.integers(1, 4, len(where), np.uint8)
        region.flush()
    return place


def run(*arguments, capsys):
    """The exit code of a command, and what it said."""
    capsys.readouterr()
    code = run_program([str(each) for each in arguments])
    found = capsys.readouterr()
    return code, found.out + found.err


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_base_with_its_delta_is_the_new_checkpoint_in_every_layout(tmp_path, kind, encoding):
    base = make_base(tmp_path / "base", kind)
    new = train(base, tmp_path / "new")
    delta = write_delta(base, new, tmp_path, 1, encoding, split=kind == "sharded")
    options = SourceOptions(apply=(str(delta),))
    assert digest(base, source_options=options).digest == digest(new).digest != digest(base).digest
    reshard(base, tmp_path / "out", source_options=options)
    received = tmp_path / "received"
    shutil.copytree(base, received)
    receive(received, delta)
    assert read_stored(received) == read_stored(new) == read_stored(tmp_path / "out")
    if kind != "fp8":
        mesh = ReshardOptions(mesh=Mesh.of(tp=2))
        done = reshard(base, tmp_path / "tp", mesh, source_options=options)
        reshard(new, tmp_path / "tp-new", mesh)
        assert done.record.options["apply"] == "weight_v000001"
        assert read_files(tmp_path / "tp") == read_files(tmp_path / "tp-new")
    against = VerifyOptions(against=str(base), level="full")
    assert verify(tmp_path / "out", against, source_options=options).ok
    assert verify(new, against, source_options=options).ok
    assert not verify(base, against, source_options=options).ok


def read_files(place):
    return {file.name: file.read_bytes() for file in place.glob("*.safetensors")}


@pytest.mark.parametrize("algorithm", ["xxh3-128", "blake3", "adler32"])
def test_deltas_are_applied_in_their_order(tmp_path, algorithm):
    base = make_base(tmp_path / "base")
    first = train(base, tmp_path / "first", 1)
    second = train(first, tmp_path / "second", 2, skip=("lm_head.weight",))
    deltas = [
        str(write_delta(base, first, tmp_path, 1, "xor", algorithm)),
        str(write_delta(first, second, tmp_path, 2, "overwrite", algorithm)),
    ]
    options = SourceOptions(apply=tuple(deltas))
    assert digest(base, source_options=options).digest == digest(second).digest
    done = reshard(base, tmp_path / "out", source_options=options)
    assert done.record.options["apply"] == "weight_v000001, weight_v000002"
    for wrong in (deltas[::-1], deltas[:1] * 2):
        with pytest.raises(SourceError, match="builds on version"):
            digest(base, source_options=SourceOptions(apply=tuple(wrong)))
    late = digest(first, source_options=SourceOptions(apply=(deltas[1],)))
    assert late.digest == digest(second).digest
    assert any("which is assumed" in warning for warning in late.warnings)
    marker = first / ".weight_sync" / "state.json"
    marker.parent.mkdir()
    marker.write_text('{"version": "000001"}')
    noted = digest(first, source_options=SourceOptions(apply=(deltas[1],)))
    assert noted.digest == digest(second).digest
    assert not any("which is assumed" in warning for warning in noted.warnings)
    with pytest.raises(SourceError, match=r"builds on version 0, and .*first is version 1"):
        digest(first, source_options=SourceOptions(apply=(deltas[0],)))


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_a_wrong_base_or_a_flipped_byte_ends_with_4(tmp_path, encoding, capsys):
    base = make_base(tmp_path / "base")
    new = train(base, tmp_path / "new")
    delta = write_delta(base, new, tmp_path, 1, encoding)
    other = train(base, tmp_path / "other", 5, share=0.01)
    code, said = run("reshard", other, tmp_path / "out", "--apply", delta, capsys=capsys)
    assert code == 4
    assert "checksums say" in said
    assert "or the base is another one" in said
    file = next(delta.glob("*.safetensors"))
    whole = file.read_bytes()
    start = 8 + struct.unpack("<Q", whole[:8])[0]
    for at in np.random.default_rng(3).integers(start, len(whole), 12):
        damaged = bytearray(whole)
        damaged[at] ^= 0x11
        file.write_bytes(damaged)
        code, said = run("reshard", base, tmp_path / "out", "--apply", delta, capsys=capsys)
        assert code in {0, 4}  # zstd has bits that mean nothing
        if code == 0:
            assert read_stored(tmp_path / "out") == read_stored(new)
            shutil.rmtree(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def edit_delta(delta, change):
    """Write the one file of a delta anew, with other frames and checksums."""
    file = next(delta.glob("*.safetensors"))
    with safe_open(file, "numpy") as opened:
        sums, frames = opened.metadata(), {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    change(frames, sums)
    save_arrays(frames, file, sums)
    index = json.loads((delta / INDEX).read_text())
    index["weight_map"] = dict.fromkeys(frames, file.name)
    (delta / INDEX).write_text(json.dumps(index))


NAME = "model.layers.0.self_attn.q_proj.weight"
"""Of 2,048 bytes."""


def pack(raw):
    return np.frombuffer(zstandard.ZstdCompressor(level=1).compress(raw), np.uint8)


def pack_widely(raw):
    wide = zstandard.ZstdCompressionParameters(window_log=25, compression_level=1)
    return np.frombuffer(zstandard.ZstdCompressor(compression_params=wide).compress(raw), np.uint8)


HOSTILE = {
    "a bomb": ("xor", lambda: pack(bytes(256 << 20)), "more bytes than the tensor|differ"),
    "short": ("xor", lambda: pack(bytes(2047)), "ends early"),
    "no frame": ("xor", lambda: np.frombuffer(b"abcdefgh", np.uint8), "cannot be decompressed"),
    "no bytes": ("xor", lambda: np.zeros(0, np.uint8), "ends early"),
    "window": ("xor", lambda: pack_widely(np.random.default_rng(0).bytes(40 << 20)), "window of more than"),
    "count": ("overwrite", lambda: pack(struct.pack("<I", 1 << 31) + bytes(64)), "changes 2,147,483,648 bytes"),
    "position": ("overwrite", lambda: pack(struct.pack("<II", 1, 2048) + b"x"), "changes byte 2,048 of 2,048"),
    "order": ("overwrite", lambda: pack(struct.pack("<III", 2, 5, 5) + b"xy"), "positions that do not rise"),
    "few values": ("overwrite", lambda: pack(struct.pack("<III", 2, 5, 6) + b"x"), "ends early"),
    "many values": ("overwrite", lambda: pack(struct.pack("<II", 1, 5) + bytes(9 << 20)), "more bytes than|differs"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_differences_are_refused_in_little_memory(tmp_path, what):
    import tracemalloc

    base = make_base(tmp_path / "base")
    encoding, make, message = HOSTILE[what]
    delta = write_delta(base, train(base, tmp_path / "new"), tmp_path, 1, encoding)
    frame = make()
    edit_delta(delta, lambda frames, _: frames.update({NAME: frame}))
    tracemalloc.start()
    with pytest.raises(SourceError, match=message):
        digest(base, source_options=SourceOptions(apply=(str(delta),)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 << 20


INDEXES = {
    "delta_encoding": ("add", UnsupportedError, "delta_encoding 'add', which is not known"),
    "compression_format": ("lz4", UnsupportedError, "compression_format 'lz4', which is not known"),
    "checksum_format": ("crc32", UnsupportedError, "checksum_format 'crc32', which is not known"),
    "version": ("one", SourceError, "'one', not a number"),
    "base_version": (None, SourceError, "None, not a number"),
}


@pytest.mark.parametrize("key", INDEXES)
def test_what_the_index_says_and_is_not_known_is_refused(tmp_path, key):
    base = make_base(tmp_path / "base")
    delta = write_delta(base, train(base, tmp_path / "new"), tmp_path, 1)
    index = json.loads((delta / INDEX).read_text())
    value, error, message = INDEXES[key]
    index["metadata"][key] = value
    (delta / INDEX).write_text(json.dumps(index))
    with pytest.raises(error, match=message):
        inspect(base, source_options=SourceOptions(apply=(str(delta),)))


def test_tensors_and_checksums_that_are_not_there_are_named(tmp_path):
    base = make_base(tmp_path / "base")
    delta = write_delta(base, train(base, tmp_path / "new"), tmp_path, 1)
    options = SourceOptions(apply=(str(delta),))
    edit_delta(delta, lambda _, sums: sums.pop(NAME))
    with pytest.raises(SourceError, match=f"has no checksum of {NAME}"):
        inspect(base, source_options=options)
    edit_delta(delta, lambda frames, sums: (frames.update(other=frames[NAME]), sums.update({NAME: "", "other": ""})))
    with pytest.raises(SourceError, match=r"changes other, which .* does not have"):
        inspect(base, source_options=options)
    edit_delta(delta, lambda frames, _: frames.update(other=np.zeros((2, 2), np.float32)))
    with pytest.raises(SourceError, match=r"other in .* is not one dim of bytes"):
        inspect(base, source_options=options)
    for wrong, message in ((base, "names no|has no"), (tmp_path / "none", "does not exist")):
        with pytest.raises(SourceError, match=message):
            inspect(base, source_options=SourceOptions(apply=(str(wrong),)))


@pytest.mark.parametrize("empty", [False, True])
def test_a_delta_by_itself_says_what_it_is(tmp_path, empty, capsys):
    base = make_base(tmp_path / "base")
    delta = write_delta(base, base if empty else train(base, tmp_path / "new"), tmp_path, 1)
    for command in (["inspect", delta], ["reshard", delta, tmp_path / "out"], ["plan", delta], ["digest", delta]):
        code, said = run(*command, capsys=capsys)
        assert code == 4
        assert "is a weight delta (version 000001 on 000000)" in said
        assert f"shardctl reshard BASE DST --apply {delta}" in " ".join(said.split())
    if empty:
        options = SourceOptions(apply=(str(delta),))
        assert digest(base, source_options=options).digest == digest(base).digest


def test_a_source_that_has_no_safetensors_files_is_refused(tmp_path, capsys):
    base = make_base(tmp_path / "base")
    delta = write_delta(base, train(base, tmp_path / "new"), tmp_path, 1)
    for name, options in (("dcp", ReshardOptions(to="dcp")), ("tp", ReshardOptions(mesh=Mesh.of(tp=2)))):
        reshard(base, tmp_path / name, options)
        code, said = run("digest", tmp_path / name, "--apply", delta, capsys=capsys)
        assert code == 4
        assert "--to hf" in said


def test_a_result_of_shardctl_is_a_base_too_and_its_record_is_not_the_results(tmp_path):
    made = make_base(tmp_path / "made")
    reshard(made, tmp_path / "base")
    base = tmp_path / "base"
    new = train(made, tmp_path / "new")
    delta = write_delta(made, new, tmp_path, 1)
    options = SourceOptions(apply=(str(delta),))
    assert verify(base, VerifyOptions(level="full"), source_options=options).ok
    assert digest(base, source_options=options).digest == digest(new).digest
    done = reshard(base, tmp_path / "out", source_options=options)
    assert done.record.digest == digest(new).digest
    with pytest.raises(UsageError, match="was made with the deltas weight_v000001"):
        verify(tmp_path / "out", VerifyOptions(against=str(base)))


def test_an_exchanged_delta_is_another_source(tmp_path):
    base = make_base(tmp_path / "base")
    first, second = train(base, tmp_path / "first", 1), train(base, tmp_path / "second", 2)
    delta = write_delta(base, first, tmp_path, 1)
    options = SourceOptions(apply=(str(delta),))
    assert not reshard(base, tmp_path / "out", source_options=options).done_before
    assert reshard(base, tmp_path / "out", source_options=options).done_before
    shutil.rmtree(delta)
    write_delta(base, second, tmp_path, 1)
    with pytest.raises(DestinationError):
        reshard(base, tmp_path / "out", source_options=options)


def test_reading_in_any_order_gives_the_same_bytes(tmp_path):
    from shardctl.checkpoint.delta_source import apply_deltas
    from shardctl.storage.addresses import open_source

    base = make_base(tmp_path / "base")
    first = train(base, tmp_path / "first", 1, share=0.5)
    second = train(first, tmp_path / "second", 2, share=0.02)
    deltas = [write_delta(base, first, tmp_path, 1, "overwrite"), write_delta(first, second, tmp_path, 2)]
    expected = (second / "model.safetensors").read_bytes()
    source, random = apply_deltas(open_source(base), [str(each) for each in deltas]), np.random.default_rng(7)
    for _ in range(300):
        low, high = sorted(random.integers(0, len(expected), 2))
        buffer = bytearray(int(high - low))
        source.read_at("model.safetensors", int(low), memoryview(buffer))
        assert buffer == expected[low:high]
    source.close()


def list_left(place):
    """What a run left in a directory, hidden or not."""
    return sorted(each.name for each in place.iterdir())


@pytest.mark.parametrize("kind", MODELS)
def test_a_written_delta_gives_the_new_bytes_to_every_receiver(tmp_path, kind, capsys):
    """bf16, fp32 and fp8; the new checkpoint in the layout of the base, in DCP and in ranks."""
    base = make_base(tmp_path / "base", kind)
    new = train(base, tmp_path / "new")
    others = {"dcp": {"to": "dcp"}, "tp2": {"mesh": Mesh.of(tp=2)}}
    layouts = {"hf": None, **(others if kind == "sharded" else {})}
    for number, (name, layout) in enumerate(layouts.items(), 1):
        other = new
        if layout is not None:
            other = tmp_path / name
            reshard(new, other, ReshardOptions(**layout))
        delta = tmp_path / "deltas" / name / "weight_v000001"
        code, said = run("diff", base, other, "--write", delta, "--json", capsys=capsys)
        assert code == 0, said
        document = json.loads(said)
        assert document["exit_code"] == 0
        assert not document["equal"]
        assert document["delta"]["version"] == 1
        assert list_left(delta.parent) == ["weight_v000001"]
        metadata = json.loads((delta / INDEX).read_text())["metadata"]
        assert (metadata["version"], metadata["base_version"]) == ("000001", "000000")
        received = tmp_path / f"received{number}"
        shutil.copytree(base, received)
        receive(received, delta)
        assert read_stored(received) == read_stored(new)
        options = SourceOptions(apply=(str(delta),))
        assert digest(base, source_options=options).digest == digest(new).digest
        assert document["delta"]["arrays"] == len(list_arrays(delta)) < document["delta"]["base_arrays"]


def test_arrays_of_many_tensors_are_rebuilt_from_one_each(tmp_path):
    config = CONFIG | {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "head_dim": 8}
    config |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
    torch.manual_seed(3)
    tensors = {t.name: torch.randn(t.shape).bfloat16() for t in describe_model(config | {"mlp_only_layers": []}).own()}
    (tmp_path / "one").mkdir()
    save_file(tensors, tmp_path / "one/model.safetensors")
    (tmp_path / "one/config.json").write_text(json.dumps(config))
    changed = [name for name in tensors if ".experts.1." in name or "q_proj" in name]
    assert changed
    (tmp_path / "two").mkdir()
    save_file(
        {name: t + (0.5 if name in changed else 0) for name, t in tensors.items()}, tmp_path / "two/model.safetensors"
    )
    (tmp_path / "two/config.json").write_text(json.dumps(config))
    for name in ("one", "two"):
        reshard(tmp_path / name, tmp_path / f"{name}-fused", ReshardOptions(to="hf", experts="fused"))
        reshard(tmp_path / name, tmp_path / f"{name}-ep", ReshardOptions(mesh=Mesh.of(dp=2, ep=2)))
    assert len(list_arrays(tmp_path / "one-fused")) < len(list_arrays(tmp_path / "one"))
    for a, b in (("one", "two-fused"), ("one-fused", "two"), ("one-fused", "two-ep")):
        diff(tmp_path / a, tmp_path / b, write=tmp_path / f"{a}+{b}")
        received = tmp_path / f"received {a} {b}"
        shutil.copytree(tmp_path / a, received)
        receive(received, tmp_path / f"{a}+{b}")
        assert read_stored(received) == read_stored(tmp_path / a.replace("one", "two"))


def test_a_written_delta_follows_the_version_of_its_base(tmp_path, capsys):
    base = make_base(tmp_path / "base")
    first, second = train(base, tmp_path / "first", 1), train(base, tmp_path / "second", 2)
    found = diff(base, first, write=tmp_path / "weight_v000001")
    assert (found.delta.version, found.delta.base_version) == (1, 0)
    options = SourceOptions(apply=(str(tmp_path / "weight_v000001"),))
    found = diff(base, second, source_options_a=options, write=tmp_path / "weight_v000002")
    assert (found.delta.version, found.delta.base_version) == (2, 1)
    both = SourceOptions(apply=tuple(str(tmp_path / f"weight_v00000{n}") for n in (1, 2)))
    assert digest(base, source_options=both).digest == digest(second).digest
    (first / ".weight_sync").mkdir()
    (first / ".weight_sync/state.json").write_text('{"version": "000001"}')
    code, said = run("diff", first, second, "--write", tmp_path / "weight_v000007", capsys=capsys)
    assert code == 2
    assert "the next one is weight_v000002" in said
    code, said = run("digest", second, "--apply", tmp_path / "weight_v000001", capsys=capsys)
    assert code == 4
    assert "is not the base of" in said


def test_tensors_that_the_class_does_not_have_are_in_the_delta(tmp_path):
    base = make_base(tmp_path / "base")
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    new = train(base, tmp_path / "new")
    for number, place in enumerate((base, new)):
        with safe_open(place / "model.safetensors", "pt") as opened:
            tensors = {each: opened.get_tensor(each) for each in opened.keys()}  # noqa: SIM118
        save_file({**tensors, name: torch.full((4,), float(number))}, place / "model.safetensors")
    reshard(new, tmp_path / "ranks", ReshardOptions(mesh=Mesh.of(tp=2)))
    for other in (new, tmp_path / "ranks"):
        diff(base, other, write=tmp_path / f"delta of {other.name}")
        received = tmp_path / f"received {other.name}"
        shutil.copytree(base, received)
        receive(received, tmp_path / f"delta of {other.name}")
        assert read_stored(received) == read_stored(new)


def test_what_a_delta_cannot_hold_is_refused_and_leaves_nothing(tmp_path, capsys):
    base = make_base(tmp_path / "base")
    with safe_open(base / "model.safetensors", "pt") as opened:
        tensors = {each: opened.get_tensor(each) for each in opened.keys()}  # noqa: SIM118
    odd = {
        "more": ({**tensors, "v_head.weight": torch.ones(2)}, "only .*more has .*v_head.weight"),
        "types": ({n: t.float() if n == NAME else t for n, t in tensors.items()}, r"types of .*q_proj.weight \(BF16"),
    }
    for name, (held, _) in odd.items():
        (tmp_path / name).mkdir()
        save_file(held, tmp_path / name / "model.safetensors")
        shutil.copy(base / "config.json", tmp_path / name)
    reshard(base, tmp_path / "fp8", ReshardOptions(to="hf", quantize="fp8-channel"))
    cases = [(name, 4, message) for name, (_, message) in odd.items()] + [("fp8", 4, "is quantized and the other is")]
    new = train(base, tmp_path / "new")
    (tmp_path / "there").mkdir()
    deltas = tmp_path / "deltas"
    deltas.mkdir()
    for name, expected, message in cases:
        code, said = run("diff", base, tmp_path / name, "--write", deltas / "x", capsys=capsys)
        assert code == expected, said
        assert re.search(message, " ".join(said.split())), said
    for place, expected in ((tmp_path / "there", 6), (base / "x", 6), (new, 6), ("s3://bucket/x", 2)):
        code, said = run("diff", base, new, "--write", place, capsys=capsys)
        assert code == expected, said
    reshard(base, tmp_path / "dcp", ReshardOptions(to="dcp"))
    code, said = run("diff", tmp_path / "dcp", new, "--write", deltas / "x", capsys=capsys)
    assert code == 4
    assert "--to hf" in said
    assert list_left(deltas) == []


def test_a_delta_that_was_written_wrongly_is_not_published(tmp_path, monkeypatch):
    from shardctl.conversion.delta_writing import _DeltaWriter

    base = make_base(tmp_path / "base")
    new = train(base, tmp_path / "new")
    deltas, plain = tmp_path / "deltas", _DeltaWriter._write_frame

    def spoil(self, old, source, array, file):
        found = plain(self, old, source, array, file)
        file.seek(-9, 1)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
        file.seek(8, 1)
        return found

    left = deltas / ".x.shardctl-delta" / "delta"
    left.mkdir(parents=True)
    (left / "part-0").write_text("of a run that was killed")
    with monkeypatch.context() as patched:
        patched.setattr(_DeltaWriter, "_write_frame", spoil)
        with pytest.raises(ShardctlError):
            diff(base, new, write=deltas / "x")
    assert list_left(deltas) == []
    assert diff(base, new, write=deltas / "x").delta.arrays
    assert list_left(deltas) == ["x"]


def test_optimizer_states_of_the_new_checkpoint_are_passed_over(tmp_path):
    base = make_base(tmp_path / "base")
    new = train(base, tmp_path / "new")
    with safe_open(new / "model.safetensors", "pt") as opened:
        weights = {each: opened.get_tensor(each) for each in opened.keys()}  # noqa: SIM118
    states = {name: {"exp_avg": value.float(), "step": torch.tensor(1.0)} for name, value in weights.items()}
    dcp.save({"model": weights, "optimizer": {"state": states}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    options = SourceOptions(config=base / "config.json")
    shardctl.diff(base, tmp_path / "dcp", source_options_b=options, write=tmp_path / "weight_v000001")
    applied = SourceOptions(apply=(str(tmp_path / "weight_v000001"),))
    assert digest(base, source_options=applied).digest == digest(new).digest
