"""TensorRT-LLM's checkpoints: as NVIDIA's exporter writes them, read and written to the bit, and refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardctl.base.errors import PartitionError, ShardctlError, SourceError, UnsupportedError, UsageError
from shardctl.libraries.registry import detect_format, scan_checkpoint
from shardctl.libraries.trtllm.arrays import SCHEMA
from shardctl.libraries.trtllm.config import interpret_config
from shardctl.models import describe_model
from shardctl.models.tables.config import ModelConfig
from shardctl.options import ReshardOptions, SourceOptions, VerifyOptions
from shardctl.storage.local import LocalSource
from shardctl.tensors.mesh import Mesh
from shardctl.tensors.pieces import split_layers_evenly
from shardctl.verbs.diff import diff
from shardctl.verbs.digest import digest
from shardctl.verbs.inspect import inspect
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

FIXTURES = Path(__file__).parents[2] / "fixtures" / "trtllm"
MESHES = {
    "llama_tp8": Mesh.of(tp=8),
    "llama_tp2_pp2": Mesh.of(tp=2, pp=2),
    "llama_pp3": Mesh.of(pp=3),
    "llama_tied_tp2": Mesh.of(tp=2),
    "llama_padded_tp2": Mesh.of(tp=2),
    "llama_padded_cut_tp2": Mesh.of(tp=2),
    "qwen2_tp4": Mesh.of(tp=4),
    "mixtral_tp2": Mesh.of(tp=2),
}
CASES = tuple(MESHES)
PADDED = {"llama_tied_tp2": 63, "llama_padded_tp2": 63, "llama_padded_cut_tp2": 61}
"""Those whose vocabulary is padded, and how many tokens it has."""
WRITTEN = tuple(name for name in CASES if not name.startswith("llama_padded"))
"""Those whose vocabulary Megatron-LM did not pad to 256 rows: what is written is padded for tp only."""
CONVERTED = {
    "deepseek_tp2": (Mesh.of(tp=2), "bf16"),
    "deepseek_tp2_ep2": (Mesh.of(tp=2, ep=2), "bf16"),
    "nemotron_nas_tp8": (Mesh.of(tp=8), "keep"),
    "nemotron_nas_pp2": (Mesh.of(pp=2), "keep"),
}
"""Those that TensorRT-LLM's own converters made; routers are float32 there."""
NEEDED = (
    *("architecture", "dtype", "logits_dtype", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_size", "intermediate_size", "hidden_act", "norm_epsilon", "rotary_base"),
    *("position_embedding_type", "max_position_embeddings", "embedding_sharding_dim", "quantization"),
)
"""What TensorRT-LLM's `PretrainedConfig` and `LLaMAConfig` are made of."""


@pytest.fixture
def place(tmp_path):
    """A copy of an exported checkpoint, to be damaged."""

    def copied(name: str) -> Path:
        return Path(shutil.copytree(FIXTURES / name / "exported", tmp_path / name))

    return copied


def source_options(name: str) -> SourceOptions:
    """How a case is read: the exporter says the padded vocabulary, so of a padded one the true size is given."""
    return SourceOptions(true_vocab=PADDED.get(name))


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


def say(place: Path, **changed: object) -> None:
    """Change the config."""
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**config, **changed}))


class TestReading:
    @pytest.mark.parametrize("name", CASES)
    def test_what_nvidia_exports_is_the_model_bit_for_bit(self, name, tmp_path):
        reshard(
            FIXTURES / name / "exported", tmp_path / "hf", ReshardOptions(to="hf"), source_options=source_options(name)
        )
        ours, theirs = (load_file(at / "model.safetensors") for at in (tmp_path / "hf", FIXTURES / name / "source"))
        ours.pop("lm_head.weight", None) if "lm_head.weight" not in theirs else None
        assert ours.keys() == theirs.keys()
        assert [key for key in theirs if not same(ours[key], theirs[key])] == []

    @pytest.mark.parametrize("name", CASES)
    def test_the_config_is_that_of_the_model(self, name):
        made = scan_checkpoint(LocalSource(FIXTURES / name / "exported")).own_config.values
        config = json.loads((FIXTURES / name / "source" / "config.json").read_text())
        config |= {"rope_theta": config["rope_parameters"]["rope_theta"]}
        unlike = {key for key in made.keys() & config.keys() if made[key] != config[key] is not None}
        assert unlike == ({"vocab_size"} if name in PADDED else set())
        assert made["model_type"] == config["model_type"]

    def test_it_is_recognised_and_its_mesh_is_known(self):
        source = LocalSource(FIXTURES / "llama_tp2_pp2" / "exported")
        assert detect_format(source).name == "trtllm"
        dialect = scan_checkpoint(source).dialect
        assert (str(dialect.mesh), dialect.stages, dict(dialect.ranks)) == (
            "pp2 x tp2",
            (1, 1),
            {0: "rank0/", 1: "rank1/", 2: "rank2/", 3: "rank3/"},
        )
        found = inspect(FIXTURES / "llama_tp2_pp2" / "exported")
        assert found.architecture == "LlamaForCausalLM"


class TestWriting:
    @pytest.mark.parametrize("name", WRITTEN)
    def test_every_array_is_nvidias(self, name, tmp_path):
        """But two, where TensorRT-LLM's own converters are followed: a router in float32, and the head of a tie."""
        out = written(name, tmp_path / "out")
        for path in sorted((FIXTURES / name / "exported").glob("rank*.safetensors")):
            theirs, ours = load_file(path), load_file(out / path.name)
            extra = {"lm_head.weight"} if name == "llama_tied_tp2" else set()
            assert ours.keys() - theirs.keys() == extra
            routers = [key for key in theirs if key.endswith("router.weight")]
            assert all(same(ours[key], theirs[key].float()) for key in routers)
            rest = theirs.keys() - set(routers)
            assert [key for key in rest if not same(ours[key], theirs[key])] == []
        assert len(list(out.glob("rank*"))) == MESHES[name].world

    @pytest.mark.parametrize("name", WRITTEN)
    def test_the_config_says_what_nvidias_says(self, name, tmp_path):
        ours = json.loads((written(name, tmp_path / "out") / "config.json").read_text())
        theirs = json.loads((FIXTURES / name / "exported" / "config.json").read_text())
        classes = {"mixtral_tp2": "MixtralForCausalLM", "qwen2_tp4": "Qwen2ForCausalLM"}
        theirs["architecture"] = classes.get(name, theirs["architecture"])  # the exporter knows Llama only
        if name == "llama_tied_tp2":
            theirs["vocab_size"] = 63
        assert {key: ours[key] for key in NEEDED} == {key: theirs[key] for key in NEEDED}
        assert ours["use_parallel_embedding"] == theirs["use_parallel_embedding"]
        assert ours["mapping"].items() >= theirs["mapping"].items()
        if name == "mixtral_tp2":
            assert ours["moe"] == {"num_experts": 4, "top_k": 2, "normalization_mode": 1}

    def test_experts_divided_over_ranks(self, tmp_path):
        """moe_ep innermost, moe_tp outermost (`tensorrt_llm/mapping.py`); experts whole or cut, up before gate."""
        source = FIXTURES / "mixtral_tp2" / "source"
        whole = load_file(source / "model.safetensors")
        for ep, etp in ((2, 2), (4, 1), (1, 4)):
            out = tmp_path / f"ep{ep}"
            mesh = Mesh.of(tp=4, ep=ep, etp=etp)
            reshard(
                source, out, ReshardOptions(to="trtllm", mesh=mesh), source_options=SourceOptions(kv_heads="replicate")
            )
            mapping = json.loads((out / "config.json").read_text())["mapping"]
            assert (mapping["moe_ep_size"], mapping["moe_tp_size"]) == (ep, etp)
            for rank in range(4):
                held = range(rank % ep * 4 // ep, (rank % ep + 1) * 4 // ep)
                at = load_file(out / f"rank{rank}.safetensors")
                names = [f"model.layers.1.block_sparse_moe.experts.{e}" for e in held]
                part = rank // ep
                over = [torch.cat([whole[f"{n}.{w}.weight"].chunk(etp)[part] for w in ("w3", "w1")]) for n in names]
                down = [whole[f"{n}.w2.weight"].chunk(etp, dim=1)[part] for n in names]
                assert same(at["transformer.layers.1.mlp.fc.weight"], torch.stack(over))
                assert same(at["transformer.layers.1.mlp.proj.weight"], torch.stack(down))
            back = reshard(out, tmp_path / f"back{ep}", ReshardOptions(to="hf", dtype="bf16"))
            assert back.record.digest == digest(source).digest

    def test_ranks_of_cp_share_files(self, tmp_path):
        source = FIXTURES / "llama_tp2_pp2" / "source"
        reshard(source, tmp_path / "out", ReshardOptions(to="trtllm", mesh=Mesh.of(pp=2, cp=2, tp=2)))
        assert len(list((tmp_path / "out").glob("rank*"))) == 4
        assert json.loads((tmp_path / "out" / "config.json").read_text())["mapping"]["world_size"] == 8
        assert diff(source, tmp_path / "out").equal

    @pytest.mark.parametrize("embedding", ["whole", "vocabulary", "hidden"])
    def test_embeddings_of_every_cut(self, embedding, tmp_path):
        source = FIXTURES / "llama_tied_tp2" / "source"
        made = reshard(source, tmp_path / "out", reshard_options("llama_tied_tp2", trtllm_embedding=embedding))
        whole = load_file(source / "model.safetensors")["model.embed_tokens.weight"]
        padded = torch.nn.functional.pad(whole, (0, 0, 0, 1))
        cut = {"whole": [whole, whole], "vocabulary": padded.chunk(2), "hidden": whole.chunk(2, dim=1)}[embedding]
        for rank in range(2):
            arrays = load_file(tmp_path / "out" / f"rank{rank}.safetensors")
            assert same(arrays["transformer.vocab_embedding.weight"], cut[rank])
            assert same(arrays["lm_head.weight"], padded.chunk(2)[rank])
        assert verify(tmp_path / "out", VerifyOptions(against=str(source))).ok
        back = reshard(tmp_path / "out", tmp_path / "hf", ReshardOptions(to="hf"))
        assert back.record.digest == made.record.digest == digest(source).digest

    def test_another_cut_of_the_embedding(self, tmp_path):
        with pytest.raises(UsageError, match="unknown --trtllm-embedding 'rows'"):
            reshard(
                FIXTURES / "llama_pp3" / "source",
                tmp_path / "out",
                reshard_options("llama_pp3", trtllm_embedding="rows"),
            )
        with pytest.raises(UsageError, match="--to hf does not use --trtllm-embedding"):
            reshard(
                FIXTURES / "llama_pp3" / "source", tmp_path / "out", ReshardOptions(to="hf", trtllm_embedding="whole")
            )

    def test_layers_that_are_left_over_go_to_the_first_stages(self):
        for layers in range(1, 20):
            for count in range(1, layers + 1):
                parts = torch.tensor_split(torch.arange(layers), count)
                assert split_layers_evenly(layers, count) == tuple(len(part) for part in parts)


class TestConverters:
    """What TensorRT-LLM's own converters make, of which no config is kept."""

    @pytest.mark.parametrize("name", CONVERTED)
    def test_every_array_is_theirs(self, name, tmp_path):
        mesh = CONVERTED[name][0]
        reshard(
            FIXTURES / name / "source",
            tmp_path,
            ReshardOptions(to="trtllm", mesh=mesh),
            source_options=SourceOptions(kv_heads="replicate"),
        )
        paths = sorted((FIXTURES / name / "converted").glob("rank*.safetensors"))
        assert [path.name for path in paths] == [f"rank{n}.safetensors" for n in range(mesh.world)]
        for path in paths:
            theirs, ours = load_file(path), load_file(tmp_path / path.name)
            assert ours.keys() == theirs.keys()
            assert [key for key in theirs if not same(ours[key], theirs[key])] == []
        assert verify(tmp_path, VerifyOptions(against=str(FIXTURES / name / "source"))).ok

    @pytest.mark.parametrize("name", CONVERTED)
    def test_they_are_read_bit_for_bit(self, name, tmp_path):
        """With the config that is written here, because the fixtures have none."""
        mesh, dtype = CONVERTED[name]
        options = SourceOptions(kv_heads="replicate")
        reshard(
            FIXTURES / name / "source",
            tmp_path / "ours",
            ReshardOptions(to="trtllm", mesh=mesh),
            source_options=options,
        )
        theirs = Path(shutil.copytree(FIXTURES / name / "converted", tmp_path / "theirs"))
        shutil.copy(tmp_path / "ours" / "config.json", theirs / "config.json")
        back = reshard(theirs, tmp_path / "hf", ReshardOptions(to="hf", dtype=dtype))
        assert back.record.digest == digest(FIXTURES / name / "source").digest


class TestRefusals:
    def test_more_tokens_than_were_exported(self):
        with pytest.raises(SourceError, match="vocab_size 256, but the model has 300 tokens"):
            inspect(FIXTURES / "llama_padded_tp2" / "exported", source_options=SourceOptions(true_vocab=300))

    @pytest.mark.parametrize(
        ("mesh", "message"),
        [
            (Mesh.of(tp=8), "q_proj.weight: 4 heads cannot be divided over tp=8"),
            (Mesh.of(pp=3), "pp=3 needs at least 3 layers, but the model has 2"),
            (Mesh.of(tp=2, fsdp=2), "ranks of tp, pp and cp, but the mesh is fsdp2 x tp2"),
            (Mesh.parse("tp=2,pp=2"), "numbers the ranks of tp innermost"),
            (Mesh.of(tp=4, ep=2), "ep=2 x etp=1 is not tp=4"),
        ],
    )
    def test_a_mesh_that_does_not_fit(self, mesh, message, tmp_path):
        with pytest.raises(PartitionError, match=message):
            reshard(FIXTURES / "mixtral_tp2" / "source", tmp_path / "out", ReshardOptions(to="trtllm", mesh=mesh))

    def test_stages_of_other_sizes(self, tmp_path):
        with pytest.raises(UsageError, match="divides layers over stages by itself, as 2,1,1"):
            reshard(
                FIXTURES / "llama_pp3" / "source",
                tmp_path / "out",
                ReshardOptions(to="trtllm", mesh=Mesh.of(pp=3), stages="1,2,1"),
            )

    def test_the_last_file_that_is_missing(self, place):
        at = place("llama_tp8")
        (at / "rank7.safetensors").unlink()
        with pytest.raises(SourceError, match=r"rank7\.safetensors is missing: config\.json says tp8, which has 8"):
            scan_checkpoint(LocalSource(at))

    def test_a_mapping_that_contradicts_the_files(self, place):
        at = place("llama_tp8")
        say(at, mapping={"world_size": 4, "tp_size": 4, "pp_size": 1})
        with pytest.raises(SourceError, match=r"rank4\.safetensors is there, but config\.json says tp4"):
            scan_checkpoint(LocalSource(at))
        say(at, mapping={"world_size": 8, "tp_size": 4, "pp_size": 1})
        with pytest.raises(SourceError, match="mapping of 8 ranks, but tp=4 x pp=1 x cp=1"):
            scan_checkpoint(LocalSource(at))
        say(at, mapping={"world_size": 8, "tp_size": 8, "moe_tp_size": 4, "moe_ep_size": 4})
        with pytest.raises(SourceError, match="moe_tp=4 x moe_ep=4 ranks, but tp=8"):
            scan_checkpoint(LocalSource(at))

    def test_a_mapping_of_as_many_ranks_and_other_shapes(self, place):
        at = place("llama_tp2_pp2")
        say(at, mapping={"world_size": 4, "tp_size": 4, "pp_size": 1})
        with pytest.raises(ShardctlError, match=r"rank0/transformer\.vocab_embedding\.weight has shape"):
            diff(at, at)

    @pytest.mark.parametrize("key", ["quant_algo", "kv_cache_quant_algo"])
    def test_quantized_by_its_config(self, place, key):
        at = place("llama_tp8")
        say(at, quantization={key: "FP8"})
        with pytest.raises(UnsupportedError, match=f"quantized \\({key} is 'FP8'\\)"):
            scan_checkpoint(LocalSource(at))

    @pytest.mark.parametrize("name", ["mlp.fc.weights_scaling_factor", "mlp.fc.per_channel_scale", "mlp.fc.weight"])
    def test_quantized_by_its_arrays(self, place, name):
        at = place("llama_tp8")
        arrays = load_file(at / "rank2.safetensors")
        value = torch.zeros(6, 64, dtype=torch.int8) if name == "mlp.fc.weight" else torch.ones(1)
        save_file({**arrays, f"transformer.layers.0.{name}": value}, at / "rank2.safetensors")
        with pytest.raises(UnsupportedError, match=r"rank2\.safetensors .*quantized checkpoints .* are not read"):
            scan_checkpoint(LocalSource(at))

    def test_a_quantized_model(self, tmp_path):
        source = FIXTURES.parent / "deepseek_mp" / "fp8" / "source"
        with pytest.raises(UnsupportedError, match="stores quantized weights in formats"):
            reshard(source, tmp_path / "out", ReshardOptions(to="trtllm", mesh=Mesh.of(tp=2)))

    def test_a_model_of_another_family(self, tmp_path):
        source = FIXTURES.parent / "deepseek_mp" / "bf16" / "source"
        with pytest.raises(UnsupportedError, match="of DeepseekV3ForCausalLM stores products of"):
            reshard(source, tmp_path / "out", ReshardOptions(to="trtllm", mesh=Mesh.of(tp=2)))

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("gemma2", "checkpoint of Gemma2ForCausalLM stores norms plus one"),
            ("starcoder2", "TensorRT-LLM's arrays of Starcoder2ForCausalLM are not known here"),
            ("glm4_moe", "list of models for trtllm-build does not have Glm4MoeForCausalLM"),
        ],
    )
    def test_a_model_says_whether_the_engine_had_it(self, name, message):
        config = json.loads((FIXTURES.parent / "configs" / f"{name}.json").read_text())
        with pytest.raises(UnsupportedError, match=message) as error:
            SCHEMA.check(describe_model(config))
        assert error.value.hint == "use --to hf, which TensorRT-LLM's PyTorch backend loads if it has the model"

    @pytest.mark.parametrize(
        ("name", "changed", "message"),
        [
            ("deepseek", {"num_hidden_layers": 3, "first_k_dense_replace": 2}, "experts in every layer but the first"),
            ("deepseek", {"attention_bias": True}, "has no place for .*q_proj.bias of DeepseekForCausalLM"),
            ("nemotron-nas", {}, "has no place for .*bias of DeciLMForCausalLM"),
        ],
    )
    def test_a_variant_that_its_class_has_not(self, name, changed, message):
        config = json.loads((FIXTURES.parent / "configs_hub" / f"{name}.json").read_text())
        with pytest.raises(UnsupportedError, match=message):
            SCHEMA.check(describe_model({**config, **changed}))

    def test_routing_that_its_deepseek_has_not(self, tmp_path):
        source = Path(shutil.copytree(FIXTURES / "deepseek_tp2" / "source", tmp_path / "source"))
        say(source, routed_scaling_factor=2.5)
        with pytest.raises(UnsupportedError, match="no factor of experts"):
            reshard(source, tmp_path / "out", ReshardOptions(to="trtllm", mesh=Mesh.of(tp=2)))

    def test_layers_that_its_config_lists_by_itself(self, tmp_path):
        """As its converter writes them; shardctl writes the Hub's blocks, which its class takes as well."""
        source, out = FIXTURES / "nemotron_nas_pp2" / "source", tmp_path / "out"
        reshard(source, out, ReshardOptions(to="trtllm", mesh=Mesh.of(pp=2)))
        attention, none = {"impl": "attention", "num_key_value_heads": 4}, {"impl": "no_op"}
        mlp = {"impl": "mlp", "intermediate_size": 256}
        layers = [(attention, mlp), (none, mlp), (attention, none), (attention, mlp)]
        say(out, block_configs=None, layer_configs=[{"attention": one, "ffn": other} for one, other in layers])
        assert digest(out).digest == digest(source).digest
        say(out, layer_configs=[{"attention": {"impl": "linear"}, "ffn": mlp}] * 4)
        with pytest.raises(UnsupportedError, match=r"a layer of .*linear"):
            scan_checkpoint(LocalSource(out))
        say(out, layer_configs=[])
        with pytest.raises(SourceError, match="layer_configs that do not speak of 4 layers"):
            scan_checkpoint(LocalSource(out))

    def test_an_architecture_that_is_not_known(self, place):
        at = place("llama_tp8")
        say(at, architecture="GPTForCausalLM")
        with pytest.raises(UnsupportedError, match="describes 'GPTForCausalLM', whose arrays are not known"):
            scan_checkpoint(LocalSource(at))

    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            ({"position_embedding_type": "learned_absolute"}, "positions of another kind"),
            ({"rotary_pct": 0.5}, "positions of another kind"),
            ({"embedding_multiplier": 12.0}, "embedding_multiplier, which Llama and Qwen do not have"),
            ({"is_pruned": True}, "pruned: its weights are left out"),
            ({"mapping": {"tp_size": 8, "world_size": 8, "enable_attention_dp": True}}, "enable_attention_dp"),
            ({"mapping": {"tp_size": 8, "world_size": 8, "moe_cluster_size": 2}}, "clusters of experts"),
            ({"mapping": [8]}, "where an object is expected"),
            ({"mapping": {"tp_size": 1 << 20, "pp_size": 1}}, "mapping of 1,048,576 ranks; more than"),
            ({"num_hidden_layers": "1"}, "where a positive whole number is expected"),
        ],
    )
    def test_a_config_of_another_kind(self, place, changed, message):
        at = place("llama_tp8")
        say(at, **changed)
        with pytest.raises(SourceError, match=message):
            scan_checkpoint(LocalSource(at))

    def test_a_config_that_is_none(self, place):
        at = place("llama_tp8")
        (at / "config.json").write_text("[")
        with pytest.raises(SourceError, match="is not JSON"):
            scan_checkpoint(LocalSource(at))
        (at / "config.json").write_text('{"model_type": "llama"}')
        with pytest.raises(SourceError, match="names no architecture"):
            scan_checkpoint(LocalSource(at))
        (at / "config.json").unlink()
        with pytest.raises(SourceError, match=r"no config\.json beside rank0\.safetensors"):
            scan_checkpoint(LocalSource(at))

    def test_an_array_too_many_and_one_too_few(self, place):
        at = place("llama_tp8")
        arrays = load_file(at / "rank5.safetensors")
        save_file({**arrays, "transformer.layers.0.extra.weight": torch.ones(2)}, at / "rank5.safetensors")
        with pytest.raises(UnsupportedError, match=r"has no rank5/transformer\.layers\.0\.extra\.weight"):
            diff(at, at)
        arrays.pop("transformer.layers.0.mlp.gate.weight")
        save_file(arrays, at / "rank5.safetensors")
        with pytest.raises(SourceError, match=r"lacks rank5/transformer\.layers\.0\.mlp\.gate\.weight"):
            diff(at, at)

    def test_copies_of_a_head_that_differ_are_found(self, place):
        at = place("llama_tp8")
        arrays = load_file(at / "rank1.safetensors")
        arrays["transformer.layers.0.attention.qkv.weight"][-1] += 1
        save_file(arrays, at / "rank1.safetensors")
        with pytest.raises(SourceError, match=r"self_attn\.v_proj\.weight: copies differ in 64 elements"):
            digest(at)


class TestConfigs:
    @pytest.mark.parametrize(
        ("arrays", "said", "kind"),
        [
            ((), {}, "llama"),
            ((), {"architecture": "MistralForCausalLM"}, "mistral"),
            (("attention.qkv.bias",), {}, "qwen2"),
            (("attention.qkv.bias", "attention.dense.bias"), {}, "llama"),
            (("attention.q_layernorm.weight",), {"architecture": "Qwen3ForCausalLM"}, "qwen3"),
            (
                ("attention.q_layernorm.weight", "mlp.router.weight"),
                {"moe_intermediate_size": 8, "moe": {"num_experts": 4, "top_k": 2, "normalization_mode": 1}},
                "qwen3_moe",
            ),
            (("mlp.router.weight",), {"moe_num_experts": 4, "moe_top_k": 2}, "mixtral"),
        ],
    )
    def test_which_model_it_is_follows_from_the_arrays(self, arrays, said, kind):
        config = {
            "architecture": "LlamaForCausalLM",
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "hidden_size": 32,
            "vocab_size": 64,
            "rotary_scaling": {"type": "llama3", "factor": 8.0},
            **said,
        }
        found = interpret_config(ModelConfig(config), {f"transformer.layers.0.{name}" for name in arrays}).config.values
        assert found["model_type"] == kind
        assert found["rope_scaling"]["rope_type"] == "llama3"
        assert found.get("num_experts", found.get("num_local_experts")) == (4 if "router" in str(arrays) else None)


def reshard_options(name: str, **options: str) -> ReshardOptions:
    return ReshardOptions(to="trtllm", mesh=MESHES[name], **options)


def written(name: str, out: Path) -> Path:
    """A case's model as the layout writes it, its embedding cut where the exporter cut it."""
    said = json.loads((FIXTURES / name / "exported" / "config.json").read_text())
    options = {"trtllm_embedding": "vocabulary"} if said["use_parallel_embedding"] else {}
    reshard(
        FIXTURES / name / "source",
        out,
        reshard_options(name, **options),
        source_options=SourceOptions(kv_heads="replicate"),
    )
    return out
