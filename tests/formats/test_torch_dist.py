"""Megatron-LM's distributed checkpoints: as megatron-core writes them, read and written to the bit, refused by name."""

from __future__ import annotations

import argparse
import importlib.util
import io
import itertools
import json
import operator
import pickle
import shutil
import subprocess
import sys
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from stored_bits import bits
from stored_bytes import check, gather
from torch.distributed.checkpoint import FileSystemReader, save
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from shardctl.base.dtype import BY_NAME
from shardctl.base.errors import HostileError, PartitionError, SourceError, UnsupportedError, UsageError
from shardctl.checkpoint.opening import open_checkpoint
from shardctl.conversion.conversion_plan import plan_conversion
from shardctl.libraries.dcp.metadata import read_metadata
from shardctl.libraries.megatron.dist_buckets import unpack_buckets
from shardctl.libraries.megatron.dist_states import note_unknown_progress
from shardctl.libraries.registry import detect_format
from shardctl.options import DestinationOptions, ReshardOptions, SourceOptions, VerifyOptions
from shardctl.storage.local import LocalSource
from shardctl.tensors.box import Box
from shardctl.tensors.manifest import Chunk, Region, Tensor, TrainingState
from shardctl.tensors.mesh import Mesh
from shardctl.tensors.training import format_state_name, split_state_name
from shardctl.verbs.diff import diff
from shardctl.verbs.digest import digest
from shardctl.verbs.inspect import inspect
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

FIXTURES = Path(__file__).parents[2] / "fixtures"
HERE = FIXTURES / "torch_dist"
HASHED = DestinationOptions(checksums="sha256")
CASES = {
    "buckets_cut": Mesh.of(tp=2, pp=2, dp=2),
    "buckets_tied": Mesh.of(pp=2, dp=2),
    "buckets_virtual": Mesh.of(pp=2),
    "buckets_experts": Mesh.of(tp=2, ep=2, etp=1),
    "stacked": Mesh.of(tp=2, pp=2),
    "per_layer": Mesh.of(tp=2, pp=2),
    "singleton": Mesh.of(tp=2, pp=2),
    "qwen2_tied": Mesh.of(tp=2, pp=2),
    "qwen3": Mesh.of(tp=2),
    "moe": Mesh.of(tp=2, ep=2),
    "moe_per_layer": Mesh.of(pp=2, dp=2, ep=2),
    "moe_singleton": Mesh.of(dp=2, ep=2),
    "moe_grouped": Mesh.of(tp=2, dp=2, ep=2, etp=2),
    "virtual": Mesh.of(pp=2),
    "trained": Mesh.of(tp=2, dp=2),
    "trained_plain": Mesh.of(tp=2, pp=2),
    "trained_buckets": Mesh.of(dp=2),
    "core_0_15": Mesh.of(tp=2, dp=2),
    "core_0_12": Mesh.of(tp=2, pp=2),
    "gpt2": Mesh.of(tp=2),
    "qwen2-moe": Mesh.of(tp=2),
    "deepseek-v3": Mesh.of(tp=2, ep=2, etp=1),
    "glm4-moe": Mesh.of(tp=2, ep=2, etp=1),
    "qwen3-next": Mesh.of(tp=2),
    "nemotron-h": Mesh.of(tp=2, pp=2),
    "nemotron-h-predicting": Mesh.of(tp=2, pp=2),
    "deepseek-v3-predicting": Mesh.of(tp=2, pp=2),
}
MODELS = json.loads((HERE / "models.json").read_text())
"""The directory of each case's model, below `fixtures`."""
WRITTEN_ALIKE = (
    *(
        "stacked",
        "qwen2_tied",
        "qwen3",
        "moe",
        "gpt2",
        "qwen2-moe",
        "glm4-moe",
        "qwen3-next",
        "nemotron-h",
        "nemotron-h-predicting",
        "deepseek-v3",
        "deepseek-v3-predicting",
    ),
)
"""Cases in the keying that shardctl writes, for the mesh that wrote them."""
BUCKETS = ("trained_buckets", *(name for name in CASES if name.startswith("buckets_")))
TRAINED = ("trained", "core_0_15", "trained_plain", *BUCKETS)
MASTER = 1 + 2**-12
"""What the optimizer's copy of a weight in bfloat16 is, times that weight (`optimizer_of` of its maker)."""


def model(name: str) -> Path:
    """The model that a case was made of."""
    return FIXTURES / MODELS[name]


def published(name: str) -> dict[str, torch.Tensor]:
    """What transformers wrote, by the names of its class, which are not those of the Hub for Nemotron-H."""
    found = load_file(model(name) / "model.safetensors")
    return {each.replace("backbone.", "model."): value for each, value in found.items()}


@pytest.fixture
def place(tmp_path):
    """A copy of what megatron-core wrote, to be damaged."""

    def copied(name: str = "stacked") -> Path:
        return Path(shutil.copytree(HERE / name / "iter", tmp_path / name))

    return copied


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """What shardctl writes from a case's model."""
    made: dict[str, Path] = {}

    def write(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("written") / name
            reshard(model(name), made[name], ReshardOptions(to="torch_dist", mesh=CASES[name]))
        return made[name]

    return write


# Reading


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("config", ["the model's", "made from the args"])
def test_every_checkpoint_is_the_model_to_the_bit(name, config):
    where = HERE / name / "iter"
    given = model(name) if config == "the model's" else None
    trained = name in TRAINED
    with open_checkpoint(where, SourceOptions(config=given, weights="module" if trained else None)) as checkpoint:
        assert checkpoint.manifest.format == "torch_dist"
        found = checkpoint.manifest.tensors
        less_one = {each for each, tensor in found.items() if tensor.chunks[0].affine}  # checked as they are stored
        assert bool(less_one) == (name == "qwen3-next")
        assert all(each.endswith(".linear_attn.norm.weight") for each in less_one)
        check(where, found, {each: value - int(each in less_one) for each, value in published(name).items()})


@pytest.mark.parametrize("name", CASES)
def test_inspect_says_which_mesh_wrote_it(name):
    found = inspect(HERE / name / "iter")
    assert (found.format, found.mesh) == ("torch_dist", CASES[name])
    assert found.training.writer == "Megatron-LM"
    assert any("_extra_state" in dropped for dropped in found.dropped)


@pytest.mark.parametrize("name", TRAINED)
def test_optimizer_states_are_those_of_the_models_tensors(name):
    where, weights = HERE / name / "iter", published(name)
    with open_checkpoint(where) as checkpoint:
        training = checkpoint.manifest.training
        halves = weights["model.norm.weight"].dtype == torch.bfloat16
        masters = {k: v.float() * MASTER if halves else v for k, v in weights.items()}
        check(where, checkpoint.manifest.tensors, masters)
        assert {split_state_name(state) for state in training.states} == {
            (state, weight) for weight in weights for state in ("exp_avg", "exp_avg_sq")
        }
        for state, tensor in training.states.items():
            kind, weight = split_state_name(state)
            value = masters[weight] * 0.25 if kind == "exp_avg" else masters[weight] * masters[weight]
            assert gather(where, tensor) == bits(value), state
        assert training.step == 2


def test_the_modules_own_weights_are_read_if_they_are_asked_for():
    with open_checkpoint(HERE / "trained" / "iter", SourceOptions(weights="module")) as checkpoint:
        assert {t.dtype.name for t in checkpoint.manifest.tensors.values()} == {"BF16"}
    with (
        pytest.raises(SourceError, match="no weights of an optimizer"),
        open_checkpoint(HERE / "stacked" / "iter", SourceOptions(weights="master")),
    ):
        pass


@pytest.mark.parametrize("name", TRAINED)
def test_groups_have_the_parameters_that_megatron_gives_them(name):
    with open_checkpoint(HERE / name / "iter") as checkpoint:
        training = checkpoint.manifest.training
        decays = {p: group.settings["wd_mult"] for group in training.groups for p in group.parameters}
        assert decays == {
            name: 0.0 if "norm" in name or name.endswith("bias") else 1.0 for name in checkpoint.manifest.tensors
        }
        assert {group.settings["weight_decay"] for group in training.groups} == {0.1}


def unpacked(where: Path) -> list[str]:
    """What is said of buckets that could not be taken apart."""
    with open_checkpoint(where, SourceOptions(config=model("trained_buckets"))) as checkpoint:
        assert not checkpoint.manifest.training.states
        return [warning for warning in checkpoint.manifest.warnings if "dp_reshardable" in warning]


def test_buckets_of_other_weights_are_left_behind(place):
    where = place("trained_buckets")
    one, other = (
        f"decoder.layers.{name}.layer_norm_weight" for name in ("self_attention.linear_qkv", "mlp.linear_fc1")
    )

    def exchange(metadata) -> None:
        names = {one: other, other: one}
        metadata.storage_data = {
            MetadataIndex(names.get(index.fqn, index.fqn), index.offset, index.index): info
            for index, info in metadata.storage_data.items()
        }

    edited(where, exchange)
    (warning,) = unpacked(where)
    assert "what would be the optimizer's copy of decoder.layers.self_attention.linear_qkv.layer_norm_weight" in warning


def test_buckets_of_an_unknown_mesh_are_left_behind(place):
    where = place("buckets_cut")
    common(where)
    with open_checkpoint(where, SourceOptions(config=model("buckets_cut"))) as checkpoint:
        assert not checkpoint.manifest.training.states
        assert any("4 ranks have buckets, but 1 were expected" in each for each in checkpoint.manifest.warnings)
    kept = ReshardOptions(to="dcp", optimizer_states="keep")
    with pytest.raises(UsageError, match="no optimizer states that can be read") as error:
        reshard(where, where.with_name("out"), kept, source_options=SourceOptions(config=model("buckets_cut")))
    assert "shardctl inspect SRC says what is left behind" in error.value.hint


def test_buckets_in_the_order_of_transformer_engine_are_told_from_those_of_local_layers():
    """Its layers need CUDA: the bucket is made up, in the order of TransformerEngine's `layernorm_linear.py`."""
    f32 = BY_NAME["F32"]
    shapes = {
        "embedding.word_embeddings.weight": (4, 16),
        "decoder.layers.self_attention.linear_proj.weight": (1, 16, 16),
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight": (1, 16),
        "decoder.layers.self_attention.linear_qkv.weight": (1, 32, 16),
        "decoder.layers.mlp.linear_fc1.layer_norm_weight": (1, 16),
        "decoder.layers.mlp.linear_fc1.weight": (1, 48, 16),
        "decoder.layers.mlp.linear_fc2.weight": (1, 16, 24),
        "decoder.final_layernorm.weight": (16,),
        "output_layer.weight": (4, 16),
    }
    arrays = {
        name: Tensor(name, f32, shape, (Chunk(Box.whole(shape), f32, Region("weights", 0, ())),))
        for name, shape in shapes.items()
    }
    starts, edges, at = {}, [], 0
    for name in reversed(shapes):
        starts[name], at = -(-at // 64) * 64, -(-at // 64) * 64 + arrays[name].size
        edges += [starts[name], at]
    runs = [Box((a,), (b - a,)) for a, b in itertools.pairwise(dict.fromkeys(edges))]
    key = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.float32, torch.float32).bucket_idx_0.exp_avg"
    chunks = tuple(Chunk(run, f32, Region("bucket", 4 * run.origin[0], (4,))) for run in runs)
    found = unpack_buckets({key: Tensor(key, f32, (at,), chunks)}, arrays, Mesh.of(), len)
    assert found.title == "of Transformer Engine's layers"
    places = {name: found.states[f"optimizer.exp_avg.{name}"].chunks[0].where.offset // 4 for name in shapes}
    assert places == starts


def test_states_travel_to_trainers(tmp_path):
    reshard(HERE / "trained" / "iter", tmp_path / "dcp", ReshardOptions(to="dcp", mesh=Mesh.of(fsdp=2)))
    with open_checkpoint(tmp_path / "dcp", SourceOptions(config=model("trained"))) as checkpoint:
        assert len(checkpoint.manifest.training.states) == 3 * len(published("trained"))  # torch has steps, too


def test_replicas_that_wrote_nothing_are_ranks_all_the_same():
    found = inspect(HERE / "trained" / "iter", source_options=SourceOptions(config=model("trained")))
    assert str(found.mesh) == "dp2 x tp2"
    assert found.training.ranks == found.mesh.world == 4


@pytest.mark.parametrize("folder", ["iter_0000010", "release"])
def test_the_folder_above_is_that_of_its_last_iteration(place, folder):
    iteration = place()
    root = iteration.parent / "root"
    root.mkdir()
    iteration.rename(root / folder)
    shutil.copytree(HERE / "qwen3" / "iter", root / "iter_0000005")
    (root / "latest_checkpointed_iteration.txt").write_text("release" if folder == "release" else "10\n")
    (root / "tokenizer.json").write_text("{}")
    with open_checkpoint(root) as checkpoint:
        check(root, checkpoint.manifest.tensors, published("stacked"))
        assert [o.name for o in checkpoint.manifest.objects if o.policy == "carry"] == ["tokenizer.json"]
        assert not any("iter_0000005" in o.name for o in checkpoint.manifest.objects)


def test_the_weights_of_nemo_are_beside_its_description(place):
    iteration = place()
    root = iteration.parent / "nemo"
    (root / "context").mkdir(parents=True)
    (root / "context" / "model.yaml").write_text("_target_: LlamaModel\n")
    iteration.rename(root / "weights")
    with open_checkpoint(root) as checkpoint:
        check(root, checkpoint.manifest.tensors, published("stacked"))
        assert [o.name for o in checkpoint.manifest.objects if o.policy == "carry"] == ["context/model.yaml"]


def edited(where: Path, change) -> None:
    """Rewrite a `.metadata`, with torch's own classes."""
    path = where / ".metadata"
    metadata = pickle.loads(path.read_bytes())  # noqa: S301 - our own file
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("wrapper", ["module.", "model.module.module.", "model."])
def test_what_wrappers_put_before_the_names_is_left_out(place, wrapper):
    where = place("trained_plain")

    def renamed(key: str) -> str:
        for kind in ("exp_avg_sq", "exp_avg"):
            if key.startswith(f"optimizer.state.{kind}."):
                return f"optimizer.state.{kind}.{wrapper}{key.removeprefix(f'optimizer.state.{kind}.')}"
        return wrapper + key

    def rename(metadata) -> None:
        old = metadata.state_dict_metadata
        metadata.state_dict_metadata = {renamed(key): value for key, value in old.items()}
        metadata.storage_data = {
            MetadataIndex(renamed(index.fqn), index.offset, index.index): info
            for index, info in metadata.storage_data.items()
        }

    edited(where, rename)
    with open_checkpoint(where) as checkpoint:
        check(where, checkpoint.manifest.tensors, published("trained_plain"))
        assert len(checkpoint.manifest.training.states) == 2 * len(published("trained_plain"))
        assert any(wrapper in note for note in checkpoint.manifest.training.notes)


def test_newer_versions_keep_what_is_common_in_an_item(place):
    """Made by hand from what 0.16 wrote, as `dist_checkpointing/serialization.py` of 0.19 has it."""
    where = place()
    with open_checkpoint(where) as checkpoint:
        said = dict(checkpoint.config)
    args = argparse.Namespace(
        num_layers=2,
        hidden_size=16,
        ffn_hidden_size=24,
        num_attention_heads=4,
        group_query_attention=True,
        num_query_groups=2,
        kv_channels=4,
        max_position_embeddings=64,
        position_embedding_type="rope",
        rotary_base=10_000,
        normalization="RMSNorm",
        norm_epsilon=1e-5,
        swiglu=True,
        add_bias_linear=False,
        vocab_size=60,
        params_dtype=torch.float32,
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
    )
    saved = io.BytesIO()
    torch.save([{"args": args, "checkpoint_version": 3.0, "iteration": 10}], saved)
    (where / "common.pt").unlink()
    (where / "__9_0.distcp").write_bytes(saved.getvalue())

    def add(metadata) -> None:
        key, some = "common_state/shard_0_1", next(iter(metadata.storage_data.values()))
        metadata.state_dict_metadata[key] = BytesStorageMetadata()
        metadata.storage_data[MetadataIndex(key)] = type(some)("__9_0.distcp", 0, len(saved.getvalue()))

    edited(where, add)
    (where / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    (where / "integrity.json").write_text("{}")
    with open_checkpoint(where) as checkpoint:
        assert dict(checkpoint.config) == said
        check(where, checkpoint.manifest.tensors, published("stacked"))
        assert not [o.name for o in checkpoint.manifest.objects if o.policy == "carry"]


def test_verify_compares_the_files_with_what_megatron_noted_of_them(place):
    """`integrity.json` in this case is megatron-core 0.19.2's."""
    where = place("buckets_virtual")
    assert verify(where, VerifyOptions(level="full")).ok
    with (where / "metadata.json").open("a") as file:
        file.write(" ")
    found = [f.message for level in verify(where, VerifyOptions(level="full")).levels for f in level.findings]
    assert "metadata.json is not the file that integrity.json lists" in found
    (where / "integrity.json").write_text('{"algorithm": "sha256", "files": {"__7_0.distcp": ""}}')
    found = [f.message for level in verify(where, VerifyOptions(level="full")).levels for f in level.findings]
    assert "__7_0.distcp is missing; integrity.json lists it" in found
    (where / "integrity.json").write_text('{"algorithm": "md5", "files": {}}')
    found = [f.message for level in verify(where, VerifyOptions(level="full")).levels for f in level.findings]
    assert "integrity.json is not understood, and nothing was checked with it" in found


# Writing


@pytest.mark.parametrize("name", [*WRITTEN_ALIKE, "moe_per_layer", "virtual"])
def test_there_and_back_is_the_same(name, written, tmp_path):
    there = written(name)
    assert digest(there).digest == digest(model(name)).digest
    assert not diff(model(name), there).changes
    reshard(there, tmp_path / "back", ReshardOptions(to="hf"))
    back, want = (load_file(at / "model.safetensors") for at in (tmp_path / "back", model(name)))
    assert back.keys() == want.keys()
    assert all(bits(back[k]) == bits(want[k]) and back[k].dtype == want[k].dtype for k in want)


@pytest.mark.parametrize("name", WRITTEN_ALIKE)
def test_items_are_those_of_megatron_core(name, written):
    ours, theirs = written(name) / "release", HERE / name / "iter"
    have, want = (read_metadata(LocalSource(folder), ".metadata") for folder in (ours, theirs))
    padded = {"embedding.word_embeddings.weight", "output_layer.weight"}  # 256 rows here, 64 there
    engines = {key for key in have.tensors if key not in want.tensors}
    assert all("norm" in key for key in engines), "what Transformer Engine's layers call norms"
    assert bool(engines) == ("moe" in name or name.startswith(("deepseek-v3", "qwen3-next")))
    assert have.tensors.keys() - engines == want.tensors.keys()
    latents = {key for key in want.tensors if "_down_proj." in key}  # which only local layers divide
    for key in want.tensors.keys() - padded - latents:
        mine, own = have.tensors[key], want.tensors[key]
        assert (mine.dtype, mine.shape, set(mine.boxes)) == (own.dtype, own.shape, set(own.boxes)), key
        for box in own.boxes:
            assert stored(ours, have, key, box.origin).equal(stored(theirs, want, key, box.origin)), (key, box)
    states = {key for key in want.objects if "_extra_state" in key}
    assert states <= set(have.objects)
    assert stored(ours, have, min(states), None) == stored(theirs, want, min(states), None) == [None]


def stored(folder: Path, metadata, key: str, origin) -> torch.Tensor:
    """What torch reads out of an item."""
    item = metadata.items[key][origin]
    data = (folder / item.file).read_bytes()[item.offset : item.end]
    return torch.load(io.BytesIO(data), weights_only=True)


def test_torch_loads_it_without_megatron(written):
    folder = written("stacked") / "release"
    described = FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {k: torch.full(v.size, torch.nan) for k, v in described.items() if hasattr(v, "size")}
    _load_state_dict(state, FileSystemReader(folder), no_dist=True)
    embedding, want = state["embedding.word_embeddings.weight"], published("stacked")
    assert bits(embedding[:60]) == bits(want["model.embed_tokens.weight"])
    assert not embedding[60:].any()
    gate_up = state["decoder.layers.mlp.linear_fc1.weight"][1]
    assert bits(gate_up[:24]) == bits(want["model.layers.1.mlp.gate_proj.weight"])
    assert not any(value.isnan().any() for value in state.values())


def test_what_all_ranks_have_alike_is_what_megatron_asks_for(written):
    folder = written("moe")
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert json.loads((folder / "release" / "metadata.json").read_text()) == json.loads(
        (HERE / "moe" / "iter" / "metadata.json").read_text()
    )
    common = torch.load(folder / "release" / "common.pt", weights_only=False)
    args = common["args"]
    assert isinstance(args, argparse.Namespace)
    assert (args.num_layers, args.num_experts, args.moe_router_topk, args.padded_vocab_size) == (2, 4, 2, 256)
    assert (args.tensor_model_parallel_size, args.expert_model_parallel_size, args.params_dtype) == (
        2,
        2,
        torch.float32,
    )
    assert (common["checkpoint_version"], common["iteration"]) == (3.0, 0)
    assert common["content_metadata"] == {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}


def megatron_core() -> bool:
    """Whether the owner is installed."""
    try:
        return importlib.util.find_spec("megatron.core") is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.skipif(not megatron_core(), reason="megatron-core is not installed")
@pytest.mark.parametrize(("name", "mesh"), [("stacked", ("tp=2", "pp=2")), ("moe", ("tp=2", "ep=2"))])
def test_megatron_core_loads_it_and_computes_the_same(name, mesh, written):
    command = [sys.executable, "-m", "fixtures.torch_dist.check", model(name), written(name) / "release", *mesh]
    done = subprocess.run(command, cwd=FIXTURES.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "differ by" in done.stdout


@pytest.mark.parametrize("name", ["trained", "buckets_cut", "buckets_experts", "buckets_tied"])
def test_states_there_and_back_are_the_same(name, tmp_path):
    mesh = Mesh.of(tp=2, ep=2, etp=2, dp=2) if name == "buckets_experts" else Mesh.of(tp=2)
    asked = ReshardOptions(to="torch_dist", mesh=mesh, optimizer_states="keep", dtype="bf16")
    reshard(HERE / name / "iter", tmp_path / "out", asked)
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text() == "10"
    assert not (tmp_path / "out" / "optimizer.json").exists()
    assert verify(tmp_path / "out", VerifyOptions(level="full")).ok
    with open_checkpoint(HERE / name / "iter") as source, open_checkpoint(tmp_path / "out") as made:
        for kind in ("tensors", "training.states"):
            have, found = (operator.attrgetter(kind)(each.manifest) for each in (source, made))
            assert have.keys() == found.keys()
            for key, tensor in have.items():
                assert gather(tmp_path / "out", found[key]) == gather(HERE / name / "iter", tensor), key
        assert (made.manifest.training.step, made.manifest.training.progress["iteration"]) == (2, 10)
        assert [g.parameters for g in made.manifest.training.groups] == [
            g.parameters for g in source.manifest.training.groups
        ]
    with open_checkpoint(tmp_path / "out", SourceOptions(weights="module")) as made:
        halves = {key: weight.bfloat16() for key, weight in masters(name).items()}
        check(tmp_path / "out", made.manifest.tensors, halves)


def masters(name: str) -> dict[str, torch.Tensor]:
    """The optimizer's copies of a case's weights."""
    weights = published(name)
    return {k: v.float() * MASTER if v.dtype == torch.bfloat16 else v for k, v in weights.items()}


def test_what_megatron_resumes_from_is_in_common(tmp_path):
    asked = ReshardOptions(to="torch_dist", mesh=Mesh.of(dp=2, ep=2, etp=1), optimizer_states="keep")
    reshard(HERE / "buckets_experts" / "iter", tmp_path, asked)
    saved = torch.load(tmp_path / "iter_0000010" / "common.pt", weights_only=False)
    assert saved["content_metadata"]["distrib_optim_sharding_type"] == "fully_reshardable"
    assert (saved["iteration"], saved["args"].iteration, saved["args"].consumed_train_samples) == (10, 10, 80)
    assert (saved["args"].use_distributed_optimizer, saved["args"].no_save_rng) == (True, True)
    said = [
        (chain, group["is_expert_parallel"], group["wd_mult"], group["weight_decay"], group["step"], group["max_lr"])
        for chain, optimizer in saved["optimizer"].items()
        for group in optimizer["optimizer"]["param_groups"]
    ]
    assert said == [(e, bool(e), wd, 0.1, 2, 0.0) for e in (0, 1) for wd in (1.0, 0.0)]


def test_states_of_another_trainer_become_megatrons(tmp_path):
    reshard(HERE / "trained" / "iter", tmp_path / "dcp", ReshardOptions(to="dcp", mesh=Mesh.of(fsdp=2)))
    asked = ReshardOptions(to="torch_dist", mesh=Mesh.of(pp=2), optimizer_states="keep", dtype="bf16")
    done = reshard(tmp_path / "dcp", tmp_path / "out", asked, source_options=SourceOptions(config=model("trained")))
    assert any("--override-opt_param-scheduler" in warning for warning in done.warnings)
    common = torch.load(tmp_path / "out" / "iter_0000002" / "common.pt", weights_only=False)
    (decayed, plain) = common["optimizer"]["optimizer"]["param_groups"]
    assert (decayed["betas"], decayed["weight_decay"], plain["wd_mult"]) == ((0.9, 0.999), 0.1, 0.0)
    with open_checkpoint(tmp_path / "out") as made:
        check(tmp_path / "out", made.manifest.tensors, masters("trained"))


def test_the_norm_to_which_gradients_were_clipped_is_told(tmp_path):
    """No trainer takes it from a checkpoint of another, and every one has a default of its own."""
    keep = ReshardOptions(to="torch_dist", optimizer_states="keep")
    config = tmp_path / "hf"
    config.mkdir()
    said = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 16, "intermediate_size": 24}
    said |= {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 40}
    (config / "config.json").write_text(json.dumps(said))
    told = SourceOptions(config=config)
    done = reshard(HERE.parent / "deepspeed" / "z1", tmp_path / "out", keep, source_options=told)
    assert [w for w in done.warnings if "clipped gradients to a norm of 1: tell it to the trainer" in w]
    common = torch.load(tmp_path / "out" / "iter_0000002" / "common.pt", weights_only=False)
    assert common["args"].clip_grad == 1.0
    back = reshard(tmp_path / "out", tmp_path / "back", ReshardOptions(to="universal"), source_options=told)
    assert [w for w in back.warnings if w.startswith("Megatron-LM clipped gradients to a norm of 1")]
    same = reshard(tmp_path / "out", tmp_path / "same", keep, source_options=told)
    assert not [w for w in same.warnings if "clipped" in w]


def test_states_that_megatron_does_not_have_are_refused():
    with open_checkpoint(HERE / "trained" / "iter") as checkpoint:
        training = checkpoint.manifest.training
        name, tensor = next(iter(training.states.items()))
        odd = {name.replace("exp_avg", "max_exp_avg"): tensor}
        manifest = replace(checkpoint.manifest, training=replace(training, states=odd))
        asked = ReshardOptions(to="torch_dist", optimizer_states="keep")
        with pytest.raises(UnsupportedError, match="has a state max_exp_avg, and Megatron-LM") as caught:
            plan_conversion(replace(checkpoint, manifest=manifest), asked)
        assert "--to dcp" in caught.value.hint


def run_program(*command: object) -> None:
    words = [sys.executable, "-m", *map(str, command)]
    done = subprocess.run(words, cwd=FIXTURES.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.engine
@pytest.mark.skipif(not megatron_core(), reason="megatron-core is not installed")
@pytest.mark.parametrize(
    ("model", "dtype", "mesh", "others"),
    [
        ("llama", "float32", {"tp": 2, "dp": 2}, ({"tp": 2, "dp": 2}, {"tp": 1, "pp": 2})),
        ("llama", "bfloat16", {"tp": 1, "pp": 2, "dp": 2}, ({"tp": 1, "pp": 2, "dp": 2}, {"tp": 2})),
        ("qwen3_moe", "float32", {"tp": 1, "ep": 2}, ({"tp": 1, "ep": 2}, {"tp": 1, "pp": 2, "ep": 2})),
    ],
)
def test_megatron_core_goes_on_from_it_as_without_the_detour(model, dtype, mesh, others, tmp_path):
    program, hf = "fixtures.torch_dist.resume", tmp_path / "hf"
    run_program(program, "model", hf, model, dtype)
    run_program(program, "train", hf, tmp_path / "run", tmp_path / "run.json", *(f"{k}={v}" for k, v in mesh.items()))
    losses = json.loads((tmp_path / "run.json").read_text())
    for number, other in enumerate(others):
        asked = ReshardOptions(
            to="torch_dist",
            mesh=Mesh.of(**other, **({"etp": 1, "dp": 2 // other["tp"]} if "ep" in other else {})),
            optimizer_states="keep",
            dtype="bf16" if dtype == "bfloat16" else "keep",
        )
        out = tmp_path / f"out{number}"
        reshard(tmp_path / "run", out, asked, source_options=SourceOptions(config=hf))
        run_program(program, "resume", hf, out, tmp_path / "out.json", *(f"{k}={v}" for k, v in other.items()))
        found = json.loads((tmp_path / "out.json").read_text())
        if other == mesh:
            assert found == losses
        else:
            assert found == pytest.approx(losses, rel=1e-6 if dtype == "float32" else 2e-3)


@pytest.mark.engine
@pytest.mark.skipif(not megatron_core(), reason="megatron-core is not installed")
def test_a_model_with_mamba_goes_on_on_another_mesh(tmp_path):
    program, hf = "fixtures.torch_dist.resume_hybrid", tmp_path / "hf"
    run_program(program, "model", hf, "dense")
    run_program(program, "train", hf, tmp_path / "run", tmp_path / "run.json", "fully_reshardable", "tp=2", "dp=2")
    asked = ReshardOptions(to="torch_dist", mesh=Mesh.of(pp=2), optimizer_states="keep")
    reshard(tmp_path / "run", tmp_path / "out", asked, source_options=SourceOptions(config=hf))
    run_program(program, "resume", hf, tmp_path / "out", tmp_path / "out.json", "tp=1", "pp=2")
    losses, found = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("run", "out"))
    assert found == pytest.approx(losses, rel=1e-6)


def test_each_part_of_mamba_has_the_states_of_its_rows(tmp_path):
    weights = {name: tensor.float() for name, tensor in published("nemotron-h").items()}
    trained = {name: tensor for name, tensor in weights.items() if not name.endswith("e_score_correction_bias")}
    states = {n: {"exp_avg": t + 1, "exp_avg_sq": t * t, "step": torch.tensor(3.0)} for n, t in trained.items()}
    groups = [{"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "params": list(trained)}]
    at = tmp_path / "trained"
    save({"model": weights, "optim": {"state": states, "param_groups": groups}}, checkpoint_id=at, no_dist=True)
    told = SourceOptions(config=model("nemotron-h"))
    asked = ReshardOptions(to="torch_dist", mesh=Mesh.of(tp=2), optimizer_states="keep")
    reshard(at, tmp_path / "out", asked, source_options=told)
    folder = tmp_path / "out" / "iter_0000003"
    metadata = read_metadata(LocalSource(folder), ".metadata")
    keys = [
        f"optimizer.state.exp_avg.decoder.layers.0.mixer.in_proj.weight.{part}" for part in ("z", "x", "B", "C", "dt")
    ]
    boxes = [(key, origin) for key in keys for origin in sorted(box.origin for box in metadata.tensors[key].boxes)]
    assert len(boxes) == 2 * len(keys)
    whole = torch.cat([stored(folder, metadata, key, origin) for key, origin in boxes])
    assert whole.equal(weights["model.layers.0.mixer.in_proj.weight"] + 1)
    reshard(tmp_path / "out", tmp_path / "back", ReshardOptions(to="dcp", optimizer_states="keep"), source_options=told)
    with open_checkpoint(tmp_path / "back", told) as back:
        name = format_state_name("exp_avg", "model.layers.0.mixer.in_proj.weight")
        check(tmp_path / "back", {name: back.manifest.training.states[name]}, {name: whole})


@pytest.mark.engine
@pytest.mark.skipif(not megatron_core(), reason="megatron-core is not installed")
def test_torch_and_megatron_core_go_on_from_each_others_states(tmp_path):
    ours, theirs = "fixtures.torch_dist.resume_torch", "fixtures.torch_dist.resume"
    hf, keep = tmp_path / "hf", {"optimizer_states": "keep"}
    run_program(theirs, "model", hf, "llama", "float32")
    run_program(ours, "train", hf, tmp_path / "torch", tmp_path / "torch.json")
    said = SourceOptions(config=hf)
    asked = ReshardOptions(to="torch_dist", mesh=Mesh.of(tp=2), **keep)
    reshard(tmp_path / "torch", tmp_path / "there", asked, source_options=said)
    run_program(theirs, "resume", hf, tmp_path / "there", tmp_path / "there.json", "tp=2")
    reshard(tmp_path / "there", tmp_path / "back", ReshardOptions(to="dcp", **keep), source_options=said)
    run_program(ours, "resume", hf, tmp_path / "back", tmp_path / "back.json")
    losses, there, back = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("torch", "there", "back"))
    assert there == pytest.approx(losses, rel=1e-6)
    assert back == losses


def test_integrity_is_written_with_the_sums(tmp_path):
    goal = tmp_path / "out"
    reshard(
        HERE / "trained" / "iter",
        goal,
        ReshardOptions(to="torch_dist"),
        destination_options=DestinationOptions(checksums="sha256"),
    )
    release = goal / "release"
    said = json.loads((release / "integrity.json").read_text())
    beside = sorted(path.name for path in release.iterdir() if path.name != "integrity.json")
    assert said["algorithm"] == "sha256"
    assert list(said["files"]) == beside
    assert all(sha256((release / name).read_bytes()).hexdigest() == said["files"][name] for name in beside)
    assert "  release/integrity.json" in (goal / "SHA256SUMS").read_text()
    assert verify(goal, VerifyOptions(level="full")).ok
    (release / "metadata.json").write_text("{ }")
    assert not verify(goal, VerifyOptions(level="full")).ok


@pytest.mark.engine
@pytest.mark.skipif(not megatron_core(), reason="megatron-core is not installed")
def test_megatron_core_accepts_the_integrity_file(tmp_path):
    validation = pytest.importorskip("megatron.core.dist_checkpointing.validation")
    if not hasattr(validation, "verify_integrity_manifest"):
        pytest.skip("this megatron-core has no integrity.json; 0.19 has")
    asked = ReshardOptions(to="torch_dist", mesh=Mesh.of(tp=2))
    reshard(
        HERE / "trained" / "iter", tmp_path / "out", asked, destination_options=DestinationOptions(checksums="sha256")
    )
    validation.verify_integrity_manifest(str(tmp_path / "out" / "release"))
    part = tmp_path / "out" / "release" / "common.pt"
    part.write_bytes(part.read_bytes() + b" ")
    with pytest.raises(Exception, match=r"common\.pt: hash mismatch"):
        validation.verify_integrity_manifest(str(tmp_path / "out" / "release"))


# Refusals


def common(where: Path, **changed) -> None:
    torch.save(
        {"args": argparse.Namespace(), "checkpoint_version": 3.0, "iteration": 10} | changed, where / "common.pt"
    )


@pytest.mark.parametrize(
    ("said", "what"),
    [
        ({"sharded_backend": "zarr", "sharded_backend_version": 1}, "stored as zarr"),
        ({"sharded_backend": "torch_dist", "sharded_backend_version": 2}, "version 2 of torch_dist"),
        ({"sharded_backend": "tensorstore", "sharded_backend_version": 1}, "'tensorstore'"),
    ],
)
def test_other_backends_are_refused_by_name(place, said, what):
    where = place()
    (where / "metadata.json").write_text(json.dumps(said))
    with pytest.raises(UnsupportedError, match=what), open_checkpoint(where):
        pass


@pytest.mark.parametrize("name", ["gtp_weight_remat_size", "expert_gtp_weight_remat_size"])
def test_weight_shards_are_read_unless_gate_and_up_are_cut_together(place, name):
    """Generalized tensor parallelism: `apply_swiglu_sharded_factory` halves the rows that a rank has of both."""
    for case, swiglu in (("stacked", True), ("buckets_cut", False), ("gpt2", False)):
        where = place(case)
        common(where, args=argparse.Namespace(swiglu=swiglu, **{name: 2}))
        config = SourceOptions(config=model(case))
        if case == "gpt2":
            with open_checkpoint(where, config) as checkpoint:
                assert checkpoint.model is not None
            continue
        with pytest.raises(UnsupportedError, match=rf"{name} 2 among its args"), open_checkpoint(where, config):
            pass


def test_an_unknown_checkpoint_version_is_refused(place):
    where = place()
    common(where, checkpoint_version=1.0)
    with (
        pytest.raises(UnsupportedError, match="checkpoint_version 1"),
        open_checkpoint(where, SourceOptions(config=HERE)),
    ):
        pass


def test_a_vocabulary_that_cannot_be_known_is_asked_for(place):
    where = place()
    with open_checkpoint(where) as checkpoint:
        heads = checkpoint.config["num_attention_heads"]
    common(
        where,
        args=argparse.Namespace(
            num_layers=2,
            hidden_size=16,
            ffn_hidden_size=24,
            num_attention_heads=heads,
            group_query_attention=True,
            num_query_groups=2,
            kv_channels=4,
            position_embedding_type="rope",
            normalization="RMSNorm",
            swiglu=True,
            add_bias_linear=False,
            padded_vocab_size=64,
        ),
    )
    with pytest.raises(SourceError, match="how many tokens the vocabulary has") as error, open_checkpoint(where):
        pass
    assert "--true-vocab" in error.value.hint
    with open_checkpoint(where, SourceOptions(true_vocab=60)) as checkpoint:
        check(where, checkpoint.manifest.tensors, published("stacked"))


def test_without_common_pt_a_config_is_asked_for(place):
    where = place()
    (where / "common.pt").unlink()
    with pytest.raises(SourceError, match="without a config, nothing says") as error, open_checkpoint(where):
        pass
    assert "--config" in error.value.hint
    with open_checkpoint(where, SourceOptions(config=model("stacked"))) as checkpoint:
        check(where, checkpoint.manifest.tensors, published("stacked"))


def test_a_save_that_did_not_finish_is_refused(place):
    where = place()
    (where / ".metadata").unlink()
    with pytest.raises(SourceError, match=r"metadata\.json is there, but \.metadata is not"), open_checkpoint(where):
        pass
    where = place("qwen3")
    (where / "__1_1.distcp").unlink()
    with pytest.raises(SourceError, match=r"__1_1\.distcp is missing"), open_checkpoint(where):
        pass


def test_code_in_common_pt_is_refused(place):
    where = place()

    class Attack:
        def __reduce__(self):
            import os

            return os.system, ("true",)

    common(where, args=Attack())
    with pytest.raises(HostileError, match=r"system"), open_checkpoint(where):
        pass


def test_the_config_of_another_model_is_refused_by_name(place, tmp_path):
    config = json.loads((model("stacked") / "config.json").read_text())
    for changed, what in (
        ({"num_hidden_layers": 3}, r"has shape \[2, 16\], but the model gives it \[3, 16\]"),
        ({"tie_word_embeddings": True}, "output_layer.weight"),
        ({"vocab_size": 65}, "embedding.word_embeddings.weight has 64 rows, but the model has 65 tokens"),
        ({"model_type": "gemma", "architectures": ["GemmaForCausalLM"]}, "embeddings that are multiplied"),
    ):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config | changed))
        with (
            pytest.raises((SourceError, UnsupportedError), match=what),
            open_checkpoint(place(), SourceOptions(config=path)),
        ):
            pass
        shutil.rmtree(tmp_path / "stacked")


def test_the_matrices_of_an_adapter_are_named_for_what_they_are(place):
    where, old = place(), "decoder.final_layernorm.weight"

    def rename(metadata) -> None:
        new = "decoder.layers.self_attention.linear_qkv.adapter.linear_in.weight"
        metadata.state_dict_metadata[new] = metadata.state_dict_metadata.pop(old)
        stored = metadata.storage_data
        metadata.storage_data = {replace(k, fqn=new) if k.fqn == old else k: v for k, v in stored.items()}

    edited(where, rename)
    with pytest.raises(UnsupportedError, match=r"linear_qkv\.adapter\.linear_in") as caught, open_checkpoint(where):
        pass
    assert "export_adapter_ckpt" in caught.value.hint


def drafted(name: str, **reshard_options) -> None:
    with open_checkpoint(model(name)) as checkpoint:
        plan_conversion(checkpoint, ReshardOptions(to="torch_dist", **reshard_options))


def test_what_megatron_has_no_place_for_is_refused_by_name():
    with pytest.raises(PartitionError, match="cannot be divided into 3 equal parts"):
        drafted("stacked", mesh=Mesh.of(tp=3))
    with pytest.raises(PartitionError, match="4 experts cannot be divided over ep=3"):
        drafted("moe", mesh=Mesh.of(dp=3, ep=3))
    with pytest.raises(PartitionError, match="pp=3 needs at least 3 layers"):
        drafted("stacked", mesh=Mesh.of(pp=3))
    with pytest.raises(UnsupportedError, match=r"needs every tensor, but model\.norm\.weight"):
        drafted("stacked", exclude="model.norm")
    with pytest.raises(UsageError, match="--to torch_dist does not use --names"):
        drafted("stacked", names="keep")


def test_a_checkpoint_of_torch_alone_is_none_of_megatron():
    assert detect_format(LocalSource(FIXTURES / "dcp" / "fsdp2")).name == "dcp"
    assert detect_format(LocalSource(HERE / "stacked" / "iter")).name == "torch_dist"


def test_a_number_of_steps_that_nobody_knows_is_said():
    known, unknown = (TrainingState(step=step, progress={"iteration": 3}) for step in (3, None))
    assert not [*note_unknown_progress(known)]
    (warning,) = note_unknown_progress(unknown)
    assert warning.startswith("no single number of steps is known: Megatron-LM gets 0")


def test_settings_that_nobody_can_assign_are_said(tmp_path):
    asked = ReshardOptions(to="torch_dist", mesh=Mesh.of(), optimizer_states="keep")
    reshard(HERE / "trained" / "iter", tmp_path, asked, source_options=SourceOptions(config=model("trained")))
    (path,) = tmp_path.glob("iter_*/common.pt")
    with open_checkpoint(tmp_path) as made:
        assert made.stored.training.groups
    common = torch.load(path, weights_only=False)
    groups = common["optimizer"]["optimizer"]["param_groups"]
    groups.append({**groups[0], "lr": 0.5})
    torch.save(common, path)
    (path.parent / "integrity.json").unlink(missing_ok=True)
    with open_checkpoint(tmp_path) as made:
        assert not made.stored.training.groups
        assert any("several groups of one kind" in warning for warning in made.stored.warnings)
