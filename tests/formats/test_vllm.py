"""vLLM's sharded state: as its own loaders shard models and its own saver writes them, to the bit; refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardctl.base.errors import PartitionError, SourceError, UnsupportedError, UsageError
from shardctl.checkpoint.opening import open_checkpoint
from shardctl.conversion.conversion_plan import plan_conversion
from shardctl.conversion.plan_file import read_plan_file, write_plan_file
from shardctl.libraries.registry import detect_format, scan_checkpoint
from shardctl.libraries.vllm.arrays import FAMILIES, check_model
from shardctl.models import describe_model
from shardctl.options import ReshardOptions, SourceOptions
from shardctl.storage.local import LocalSource
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.diff import diff
from shardctl.verbs.digest import digest
from shardctl.verbs.inspect import inspect
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

FIXTURES = Path(__file__).parents[2] / "fixtures" / "vllm"
OWNERS = tuple(sorted(f"{path.parent.name}/{path.name}" for path in FIXTURES.glob("*/0.*")))
"""Every directory that vLLM wrote: ``CASE/PROFILE-MESH``."""
EXPANDED = tuple(owner for owner in OWNERS if "deepseek" in owner and not owner.endswith("mla"))
"""Those that vLLM wrote under ``VLLM_MLA_DISABLE=1``, which are read and never written."""
WIDENED = "qwen3_next"
"""A model whose source has decays in bf16, which vLLM keeps in fp32."""
WRITTEN = tuple(owner for owner in OWNERS if owner not in EXPANDED)


@pytest.fixture
def place(tmp_path):
    """A copy of a directory that vLLM wrote, to be damaged."""

    def copied(owner: str) -> Path:
        return Path(shutil.copytree(FIXTURES / owner, tmp_path / "damaged"))

    return copied


ALIKE = tuple((FIXTURES / "0.32-as-0.25.txt").read_text().split())
"""Directories of 0.25 whose every array 0.32 saves as well."""


def source(owner: str) -> Path:
    return FIXTURES / owner.partition("/")[0] / "hf"


def reshard_options(owner: str, **options: object) -> ReshardOptions:
    profile, *words = owner.partition("/")[2].split("-")
    degrees = {word[:2]: int(word[2:]) for word in words if word != "mla"}
    return ReshardOptions(**{"to": "vllm", "mesh": Mesh.of(**degrees), "vllm_profile": profile} | options)


def ranks(at: Path) -> dict[tuple[str, str], torch.Tensor]:
    """Every array, by rank and name."""
    return {
        (path.name.rpartition("-part-")[0], name): tensor
        for path in at.glob("model-*.safetensors")
        for name, tensor in load_file(path).items()
    }


def unequal(one: dict, other: dict) -> list:
    """What is in one only, or another type, shape or bits in the other."""
    both = one.keys() & other.keys()
    unlike = [
        key
        for key in both
        if one[key].dtype != other[key].dtype
        or one[key].shape != other[key].shape
        or not torch.equal(one[key].reshape(-1).view(torch.uint8), other[key].reshape(-1).view(torch.uint8))
    ]
    return [*(one.keys() ^ other.keys()), *unlike]


def change(at: Path, rank: int, **arrays: torch.Tensor | None) -> None:
    """Give a rank other arrays, by names in which dots are written as double underscores; None for none."""
    path = at / f"model-rank-{rank}-part-0.safetensors"
    have = load_file(path)
    for name, tensor in arrays.items():
        dotted = name.replace("__", ".")
        have.pop(dotted, None)
        if tensor is not None:
            have[dotted] = tensor
    save_file(have, path)


def renamed(at: Path, old: str, new: str) -> None:
    """Call a part of the names of arrays otherwise."""
    for path in at.glob("model-rank-*.safetensors"):
        save_file({name.replace(old, new): tensor for name, tensor in load_file(path).items()}, path)


def make_many_experts(at: Path, count: int) -> Path:
    """Make a small DeepSeek-V3 with so many experts."""
    have = load_file(source("deepseek_v3/") / "model.safetensors")
    random = torch.Generator().manual_seed(0)
    for name in [each for each in have if ".experts.0." in each]:
        for number in range(count):
            have[name.replace(".experts.0.", f".experts.{number}.")] = torch.randn(
                have[name].shape, generator=random
            ).bfloat16()
    for name in [each for each in have if ".mlp.gate." in each]:
        shape = count, *have[name].shape[1:]
        have[name] = torch.randn(shape, generator=random).to(have[name].dtype)
    config = json.loads((source("deepseek_v3/") / "config.json").read_text()) | {"n_routed_experts": count}
    at.mkdir()
    save_file(have, at / "model.safetensors")
    (at / "config.json").write_text(json.dumps(config))
    return at


class TestReading:
    @pytest.mark.parametrize("owner", OWNERS)
    def test_what_vllm_saves_is_the_model_bit_for_bit(self, owner, tmp_path):
        stacked = "fused" if owner.startswith(("gemma4/", "mistral4/")) else "keep"  # as their files have them
        restored = "bf16" if owner.startswith(WIDENED) else "keep"
        made = reshard(FIXTURES / owner, tmp_path / "hf", ReshardOptions(to="hf", dtype=restored, experts=stacked))
        ours, theirs = (load_file(at / "model.safetensors") for at in (tmp_path / "hf", source(owner)))
        assert unequal(ours, theirs) == []
        assert made.record.digest == digest(source(owner)).digest

    @pytest.mark.parametrize(
        ("owner", "profiles"),
        [
            ("llama/0.25-tp2", "0.32 and 0.25"),
            ("llama/0.11-tp2", "0.11, and of SGLang for some models"),
            ("../sglang/qwen2", "0.11, and of SGLang for some models"),
            ("mixtral/0.11-tp2-ep2", "0.11, and of SGLang for some models"),
            ("gemma/0.25-tp2", "0.25"),
            ("gemma/0.32-tp2", "0.32 and 0.25"),  # as another tied model has it
            ("gemma2/0.25-tp2", "0.32 and 0.25"),
            ("gpt_neox/0.25-tp2", "0.25"),
            ("gpt_neox/0.32-tp2", "0.32"),
            ("mixtral/0.25-tp2-ep2", "0.25"),
            ("mixtral/0.32-tp2-ep2", "0.32"),
            ("qwen3_vl/0.32-tp2", "0.32"),
            ("qwen3_next/0.32-tp2", "0.32"),
        ],
    )
    def test_inspect_says_which_versions_have_such_arrays(self, owner, profiles):
        training = inspect(FIXTURES / owner).training
        assert (training.writer, training.ranks, training.notes) == (
            "vLLM or SGLang" if "SGLang" in profiles and "ep2" not in owner else "vLLM",
            2,
            (f"the arrays are those of vLLM {profiles}",),
        )

    @pytest.mark.parametrize(
        ("owner", "mesh", "facts"),
        [
            ("llama/0.25-tp8", "tp8", {"profile": "0.32", "latent": False}),
            ("mixtral/0.11-tp2-ep2", "tp2 x ep2", {"profile": "0.11", "latent": False}),
            ("mixtral/0.25-tp2", "tp2", {"profile": "0.32", "latent": False}),
            ("mixtral/0.25-tp2-ep2", "tp2 x ep2", {"profile": "0.25", "latent": False}),
            ("qwen3_moe/0.32-tp4-ep4", "tp4 x ep4", {"profile": "0.32", "latent": False}),
            ("llama-tied/0.32-tp2-pp2", "pp2 x tp2", {"profile": "0.32", "latent": False}),
            ("deepseek_v3/0.25-tp2-mla", "tp2", {"profile": "0.32", "latent": True}),
            ("qwen3_5_moe/0.32-tp2-ep2", "tp2 x ep2", {"profile": "0.32", "latent": False}),
            ("gemma4/0.32-tp2-ep2", "tp2 x ep2", {"profile": "0.32", "latent": False}),
        ],
    )
    def test_the_files_say_what_they_are(self, owner, mesh, facts):
        at = LocalSource(FIXTURES / owner)
        assert detect_format(at).name == "vllm"
        found = scan_checkpoint(at).dialect
        assert (str(found.mesh), dict(found.facts)) == (mesh, {**facts, "vocabulary_type": "BF16"})
        assert inspect(FIXTURES / owner).format == "vllm"

    def test_ranks_with_several_files(self, tmp_path):
        reshard(source("llama/"), tmp_path / "parts", reshard_options("llama/0.25-tp2", max_shard_size=20_000))
        parts = sorted(path.name for path in (tmp_path / "parts").glob("model-rank-1-*"))
        assert parts == [f"model-rank-1-part-{n}.safetensors" for n in range(len(parts))]
        assert len(parts) > 1
        assert unequal(ranks(tmp_path / "parts"), ranks(FIXTURES / "llama" / "0.25-tp2")) == []
        assert digest(tmp_path / "parts").digest == digest(source("llama/")).digest

    @pytest.mark.parametrize("name", ["granite", "mistral", "phi3", "qwen2", "qwen3"])
    def test_sglangs_arrays_of_some_models_are_those_of_the_oldest_profile(self, name, tmp_path):
        given, saved = source(f"{name}/"), FIXTURES.parent / "sglang" / name
        read = SourceOptions(config=given / "config.json")
        assert digest(saved, source_options=read).digest == digest(given).digest
        reshard(given, tmp_path / "out", reshard_options(f"{name}/0.11-tp2"))
        assert unequal(ranks(tmp_path / "out"), ranks(saved)) == []

    @pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "qwen2_moe"])
    def test_sglangs_arrays_of_latents_and_shared_experts_have_names_of_its_own(self, name, tmp_path):
        given, saved = source(f"{name}/"), FIXTURES.parent / "sglang" / name
        read = SourceOptions(config=given / "config.json")
        assert digest(saved, source_options=read).digest == digest(given).digest
        training = inspect(saved, source_options=read).training
        assert (training.writer, training.notes) == ("SGLang", ("the arrays are those of SGLang",))
        reshard(given, tmp_path / "out", ReshardOptions(to="vllm", vllm_profile="sglang", mesh=Mesh.of(tp=2)))
        assert unequal(ranks(tmp_path / "out"), ranks(saved)) == []

    @pytest.mark.parametrize("kind", ["fused", "ran"])
    def test_sglangs_shared_expert_behind_the_others_and_what_it_saves_after_a_pass(self, kind):
        given, saved = source("deepseek_v3/"), FIXTURES.parent / "sglang" / f"deepseek_v3-{kind}"
        assert digest(saved, source_options=SourceOptions(config=given / "config.json")).digest == digest(given).digest

    def test_sglangs_two_names_for_one_array_are_not_joined(self, place):
        at = place("../sglang/deepseek_v3-ran")
        change(at, 0, model__layers__0__self_attn__kv_b_proj__weight=torch.zeros(64, 16, dtype=torch.bfloat16))
        given = SourceOptions(config=source("deepseek_v3/") / "config.json")
        with pytest.raises(UnsupportedError, match=r"rank0/model\.layers\.0\.self_attn\.attn_mha\.kv_b_proj\.weight"):
            digest(at, source_options=given)

    def test_sglangs_gemma_2_has_an_array_more_and_is_refused_by_name(self):
        saved, given = FIXTURES.parent / "sglang" / "gemma2", source("gemma2/")
        with pytest.raises(UnsupportedError, match=r"has no rank0/model\.normalizer") as raised:
            digest(saved, source_options=SourceOptions(config=given / "config.json"))
        assert "SGLang" in str(raised.value.hint)

    def test_arrays_of_another_engine_are_answered_with_what_to_do(self, place):
        at = place("llama/0.11-tp2")
        renamed(at, "model.norm.weight", "model.last_norm.weight")
        with pytest.raises(UnsupportedError, match=r"has no rank0/model\.last_norm\.weight") as raised:
            digest(at)
        assert "SGLang, whose files have the same names: convert the model that" in str(raised.value.hint)

    def test_a_file_alone_is_a_safetensors_file(self):
        at = FIXTURES / "llama" / "0.25-tp2" / "model-rank-0-part-0.safetensors"
        assert detect_format(LocalSource(at)).name == "safetensors"


class TestWriting:
    @pytest.mark.parametrize("owner", WRITTEN)
    def test_every_array_is_vllms(self, owner, tmp_path):
        reshard(source(owner), tmp_path / "out", reshard_options(owner))
        assert unequal(ranks(tmp_path / "out"), ranks(FIXTURES / owner)) == []
        assert (tmp_path / "out" / "config.json").read_bytes() == (FIXTURES / owner / "config.json").read_bytes()

    @pytest.mark.parametrize("owner", ALIKE)
    def test_what_032_saves_as_025_did_is_written_for_it(self, owner, tmp_path):
        reshard(source(owner), tmp_path / "out", reshard_options(owner, vllm_profile="0.32"))
        assert unequal(ranks(tmp_path / "out"), ranks(FIXTURES / owner)) == []

    @pytest.mark.parametrize(
        ("given", "asked"), [("hf", reshard_options("llama/0.25-tp2")), ("0.25-tp2", ReshardOptions(to="hf"))]
    )
    def test_files_that_are_no_weights_travel_both_ways(self, given, asked, tmp_path):
        reshard(FIXTURES / "llama" / given, tmp_path / "out", asked)
        assert (tmp_path / "out" / "vocab.txt").read_bytes() == (FIXTURES / "llama/hf/vocab.txt").read_bytes()

    @pytest.mark.parametrize(
        ("owner", "want"),
        [
            ("llama/0.25-tp8", "llama/0.11-tp2"),
            ("mixtral/0.11-tp2-ep2", "mixtral/0.25-tp2"),
            ("deepseek_v3/0.11-tp2-ep2", "deepseek_v3/0.25-tp2-ep2-mla"),
        ],
    )
    def test_from_one_mesh_and_version_to_another(self, owner, want, tmp_path):
        reshard(FIXTURES / owner, tmp_path / "out", reshard_options(want))
        assert unequal(ranks(tmp_path / "out"), ranks(FIXTURES / want)) == []

    def test_the_newest_profile_is_written_where_none_is_asked_for(self, tmp_path):
        reshard(source("llama/"), tmp_path / "out", ReshardOptions(to="vllm", mesh=Mesh.of(tp=8)))
        assert unequal(ranks(tmp_path / "out"), ranks(FIXTURES / "llama" / "0.25-tp8")) == []

    def test_one_rank_needs_no_mesh(self, tmp_path):
        reshard(FIXTURES / "llama" / "0.25-tp8", tmp_path / "out", ReshardOptions(to="vllm"))
        assert len(list((tmp_path / "out").glob("*.safetensors"))) == 1
        assert diff(source("llama/"), tmp_path / "out").equal

    def test_a_cast_is_of_padding_and_zeros_too_and_not_of_factors(self, tmp_path):
        reshard(source("gpt_oss/"), tmp_path / "out", reshard_options("gpt_oss/0.25-tp2", dtype="fp16"))
        reshard(source("llama/"), tmp_path / "llama", reshard_options("llama/0.25-tp8", dtype="fp16"))
        found = ranks(tmp_path / "out") | ranks(tmp_path / "llama")
        factors = {torch.float32 if name.endswith("_scale") else torch.float16 for _, name in found}
        assert {tensor.dtype for tensor in found.values()} == factors
        assert all(tensor.dtype == torch.float32 for (_, name), tensor in found.items() if name.endswith("_scale"))
        assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float16"
        for at in ("out", "llama"):
            reshard(tmp_path / at, tmp_path / f"{at}-back", ReshardOptions(to="hf"))

    def test_layers_that_predict_are_left_behind_and_said(self, tmp_path):
        deepseek = FIXTURES.parent / "deepseek_mp" / "predicting" / "source"
        made = reshard(deepseek, tmp_path / "out", ReshardOptions(to="vllm", mesh=Mesh.of(tp=2)))
        assert any("draft_load_config" in said for said in made.warnings)
        assert verify(tmp_path / "out").ok

    def test_a_plan_keeps_the_profile(self, tmp_path):
        with open_checkpoint(source("llama/")) as checkpoint:
            write_plan_file(tmp_path / "plan.json", plan_conversion(checkpoint, reshard_options("llama/0.11-tp2")))
        assert read_plan_file(tmp_path / "plan.json").reshard_options.vllm_profile == "0.11"


def test_no_model_is_known_whose_arrays_vllm_has_not_shown():
    shown = {json.loads(path.read_text())["model_type"] for path in FIXTURES.glob("*/hf/config.json")}
    assert shown == FAMILIES.keys()


class TestNewerModels:
    """What was compared with vLLM 0.32 alone."""

    def test_of_another_profile(self, tmp_path):
        with pytest.raises(UnsupportedError, match=r"known of vLLM 0\.32 alone, not of 0\.25"):
            reshard(source("qwen3_5/"), tmp_path / "out", reshard_options("qwen3_5/0.25-tp4"))

    def test_stages_where_layers_borrow_keys_of_earlier_ones(self, tmp_path):
        with pytest.raises(PartitionError, match="makes no stages of Gemma4ForCausalLM where layers borrow keys"):
            reshard(source("gemma4_text/"), tmp_path / "out", reshard_options("gemma4_text/0.32-pp2"))

    def test_heads_of_linear_attention(self, tmp_path):
        with pytest.raises(PartitionError, match="4 key heads of linear attention cannot be divided over tp=8"):
            reshard(source("qwen3_next/"), tmp_path / "out", reshard_options("qwen3_next/0.32-tp8"))

    def test_biases_that_vllm_drops(self, tmp_path):
        shutil.copytree(source("qwen3_next/"), tmp_path / "hf")
        config = json.loads((tmp_path / "hf" / "config.json").read_text())
        (tmp_path / "hf" / "config.json").write_text(json.dumps({**config, "attention_bias": True}))
        path = tmp_path / "hf" / "model.safetensors"
        state = load_file(path)
        for name, tensor in load_file(path).items():
            if "self_attn" in name and name.endswith("_proj.weight"):
                state[name.replace("weight", "bias")] = torch.zeros(tensor.shape[0], dtype=tensor.dtype)
        save_file(state, path)
        with pytest.raises(UnsupportedError, match=r"no place for model\.layers\.1\.self_attn\.o_proj\.bias"):
            reshard(tmp_path / "hf", tmp_path / "out", reshard_options("qwen3_next/0.32-tp2"))

    def test_latent_attention_that_vllm_cannot_cut(self, tmp_path):
        with pytest.raises(PartitionError, match="no class of its own for Mistral4ForCausalLM, and ends in an error"):
            reshard(source("mistral4/"), tmp_path / "out", reshard_options("mistral4/0.32-tp2"))

    @pytest.mark.parametrize("kind", ["granitemoehybrid", "falcon_h1", "nemotron_h", "mamba2"])
    def test_decays_of_mamba_that_vllm_changes(self, kind):
        model = describe_model(json.loads((FIXTURES.parent / "configs" / f"{kind}.json").read_text()))
        with pytest.raises(UnsupportedError, match=r"vLLM stores -exp\(A_log\) of "):
            check_model(model)

    def test_a_head_of_its_own_where_vllm_ties_it(self, tmp_path):
        shutil.copytree(source("lfm2/"), tmp_path / "hf")
        config = json.loads((tmp_path / "hf" / "config.json").read_text())
        (tmp_path / "hf" / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
        path = tmp_path / "hf" / "model.safetensors"
        state = load_file(path)
        save_file(state | {"lm_head.weight": state["model.embed_tokens.weight"] + 1}, path)
        with pytest.raises(UnsupportedError, match=r"no place for lm_head\.weight: its Lfm2ForCausalLM ties it"):
            reshard(tmp_path / "hf", tmp_path / "out", reshard_options("lfm2/0.32-tp2"))

    def test_keys_of_layers_that_borrow_them_are_left_behind_and_said(self, tmp_path):
        shutil.copytree(source("gemma4_text/"), tmp_path / "hf")
        path = tmp_path / "hf" / "model.safetensors"
        state = load_file(path)
        for name in ("k_proj.weight", "v_proj.weight", "k_norm.weight"):  # as the Hub's files have them
            state[f"model.layers.2.self_attn.{name}"] = state[f"model.layers.0.self_attn.{name}"].clone()
        save_file(state, path)
        made = reshard(tmp_path / "hf", tmp_path / "out", reshard_options("gemma4_text/0.32-tp2"))
        assert any("3 tensors of layers that borrow keys and values are left behind" in said for said in made.warnings)
        assert unequal(ranks(tmp_path / "out"), ranks(FIXTURES / "gemma4_text/0.32-tp2")) == []


class TestForeignNames:
    """vLLM's arrays in files of other names are a Llama checkpoint by their config, and not by their names."""

    def test_a_result_whose_names_do_not_fit_its_config_is_said(self, place, tmp_path):
        at = place("llama/0.25-tp2")
        (at / "model-rank-1-part-0.safetensors").unlink()
        (at / "model-rank-0-part-0.safetensors").rename(at / "weights.safetensors")
        made = reshard(at, tmp_path / "out", ReshardOptions(to="hf"))
        assert any(said.startswith("the names do not fit the class in config.json") for said in made.warnings)
        made = reshard(source("llama/"), tmp_path / "hf", ReshardOptions(to="hf"))
        assert not any("names do not fit" in said for said in made.warnings)

    def test_stages_are_recognised(self, tmp_path):
        made = reshard(FIXTURES / "llama-tied" / "0.32-tp2-pp2", tmp_path / "hf", ReshardOptions(to="hf"))
        assert made.record.digest == digest(source("llama-tied/")).digest
        assert not made.warnings


class TestRefusals:
    @pytest.mark.parametrize(
        ("owner", "mesh", "message"),
        [
            ("llama/", Mesh.of(dp=2, tp=2), "dp=2 is not possible: every replica loads the same directory"),
            ("llama/", Mesh.of(fsdp=2), "fsdp=2 is not possible: vLLM does not cut weights this way"),
            ("llama/", Mesh.of(tp=3), "pads 100 rows to 128, which tp=3 does not divide"),
            ("llama/", Mesh.of(tp=16), "8 attention heads cannot be divided over tp=16"),
            ("mixtral/", Mesh.of(tp=4, ep=2), "over all ranks of tp or over none, but the mesh is tp4 x ep2"),
            ("mixtral/", Mesh.of(tp=8, ep=8), "4 experts are too few for ep=8"),
        ],
    )
    def test_a_mesh_that_does_not_fit(self, owner, mesh, message, tmp_path):
        with pytest.raises(PartitionError, match=message):
            reshard(source(owner), tmp_path / "out", ReshardOptions(to="vllm", mesh=mesh))

    def test_heads_that_can_neither_be_divided_nor_repeated(self, tmp_path):
        config = json.loads((source("llama/") / "config.json").read_text())
        shapes = {"q_proj": (48, 32), "k_proj": (24, 32), "v_proj": (24, 32), "o_proj": (32, 48)}
        arrays = load_file(source("llama/") / "model.safetensors")
        for name in arrays:
            part = name.split(".")[-2]
            arrays[name] = torch.zeros(shapes[part], dtype=torch.bfloat16) if part in shapes else arrays[name]
        (tmp_path / "hf").mkdir()
        save_file(arrays, tmp_path / "hf" / "model.safetensors")
        heads = {"num_attention_heads": 6, "num_key_value_heads": 3}
        (tmp_path / "hf" / "config.json").write_text(json.dumps({**config, **heads}))
        with pytest.raises(
            PartitionError, match="3 key/value heads can neither be divided over tp=2 nor repeated evenly"
        ):
            reshard(tmp_path / "hf", tmp_path / "out", ReshardOptions(to="vllm", mesh=Mesh.of(tp=2)))

    @pytest.mark.parametrize(
        ("version", "message"),
        [
            ("latest", "unknown --vllm-profile 'latest'"),
            ("0.9", r"the names of vLLM 0\.9 are not known here"),
            ("0.33.1", r"vLLM 0\.33\.1 is newer than 0\.32, the newest whose names are known here"),
            ("1.0", r"vLLM 1\.0 is newer than 0\.32"),
        ],
    )
    def test_a_version_that_was_not_compared(self, version, message, tmp_path):
        with pytest.raises(UsageError, match=message):
            reshard(source("llama/"), tmp_path / "out", ReshardOptions(to="vllm", vllm_profile=version))

    def test_a_release_of_a_known_version(self, tmp_path):
        reshard(source("llama/"), tmp_path / "out", ReshardOptions(to="vllm", vllm_profile="0.11.2"))
        assert inspect(tmp_path / "out").training.notes == (
            "the arrays are those of vLLM 0.11, and of SGLang for some models",
        )

    @pytest.mark.parametrize(
        ("owner", "options", "message"),
        [
            ("gemma2/", {"mesh": Mesh.of(tp=2)}, "SGLang's arrays of Gemma2ForCausalLM are not known here"),
            ("gpt_oss/", {"mesh": Mesh.of(tp=2)}, "SGLang's arrays of GptOssForCausalLM are not known here"),
            ("mixtral/", {"mesh": Mesh.of(tp=2, ep=2)}, "experts that are divided whole were not compared"),
            ("llama/", {"mesh": Mesh.of(pp=2)}, "the files of SGLang have no names for stages"),
        ],
    )
    def test_what_was_not_compared_with_sglang_is_not_written_for_it(self, owner, options, message, tmp_path):
        with pytest.raises((PartitionError, UnsupportedError), match=message):
            reshard(source(owner), tmp_path / "out", ReshardOptions(to="vllm", vllm_profile="sglang", **options))

    def test_of_256_experts_sglang_has_the_shared_one_behind_them(self, tmp_path):
        given = make_many_experts(tmp_path / "hf", 256)
        done = reshard(given, tmp_path / "out", ReshardOptions(to="vllm", vllm_profile="sglang", mesh=Mesh.of(tp=2)))
        assert "--disable-shared-experts-fusion does not load the result" in done.warnings[0]
        arrays = ranks(tmp_path / "out")
        assert arrays["model-rank-1", "model.layers.1.mlp.experts.w13_weight"].shape == (257, 16, 32)
        assert not [name for _, name in arrays if "shared_experts" in name]
        assert digest(tmp_path / "out").digest == digest(given).digest

    def test_stages_of_a_version_that_has_no_names_for_them(self, tmp_path):
        with pytest.raises(PartitionError, match=r"the files of vLLM 0\.25 have no names for stages"):
            reshard(source("llama/"), tmp_path / "out", reshard_options("llama/0.25-tp2-pp2"))

    def test_stages_that_vllm_would_not_make(self, tmp_path):
        deepseek = FIXTURES.parent / "deepseek_mp" / "predicting" / "source"
        with pytest.raises(PartitionError, match="vLLM divides layers over stages by itself, as 31,30"):
            reshard(deepseek, tmp_path / "out", reshard_options("deepseek_v3/0.32-pp2", stages="30,31"))

    def test_a_stage_that_is_missing_and_files_of_two_saves(self, place):
        at = place("llama-tied/0.32-tp2-pp2")
        shutil.copy(at / "model-pp-0-tp-0-part-0.safetensors", at / "model-rank-0-part-0.safetensors")
        with pytest.raises(SourceError, match="is named for stages, and model-rank-0-part-0"):
            scan_checkpoint(LocalSource(at))
        (at / "model-rank-0-part-0.safetensors").unlink()
        (at / "model-pp-0-tp-1-part-0.safetensors").unlink()
        with pytest.raises(SourceError, match="there is no file of rank 1 of stage 0, but model-pp-1-tp-1-part-0"):
            scan_checkpoint(LocalSource(at))

    def test_a_profile_for_another_layout(self, tmp_path):
        with pytest.raises(UsageError, match="vllm-profile"):
            reshard(source("llama/"), tmp_path / "out", ReshardOptions(to="hf", vllm_profile="0.11"))

    def test_a_model_that_is_not_known(self, tmp_path):
        minilm = FIXTURES.parent / "trtllm" / "qwen2_tp4" / "source"
        config = json.loads((minilm / "config.json").read_text())
        shutil.copytree(minilm, tmp_path / "hf")
        (tmp_path / "hf" / "config.json").write_text(
            json.dumps({**config, "model_type": "stablelm", "architectures": ["StableLmForCausalLM"]})
        )
        with pytest.raises(UnsupportedError, match="StableLm"):
            reshard(tmp_path / "hf", tmp_path / "out", ReshardOptions(to="vllm", mesh=Mesh.of(tp=2)))

    def test_a_quantized_model(self, tmp_path):
        fp8 = FIXTURES.parent / "deepseek_mp" / "fp8" / "source"
        with pytest.raises(UnsupportedError, match="vLLM reorders quantized weights"):
            reshard(fp8, tmp_path / "out", ReshardOptions(to="vllm", mesh=Mesh.of(tp=2)))

    @pytest.mark.parametrize(
        ("name", "value", "message"),
        [
            ("model__layers__0__mlp__down_proj__weight_scale", torch.ones(1), "belongs to quantized weights"),
            ("model__layers__0__mlp__down_proj__qweight", torch.ones(1), "belongs to quantized weights"),
            ("model__norm__weight", torch.ones(32).to(torch.float8_e4m3fn), "is F8_E4M3"),
        ],
    )
    def test_quantized_files(self, place, name, value, message):
        at = place("llama/0.25-tp2")
        change(at, 1, **{name: value})
        with pytest.raises(UnsupportedError, match=rf"model-rank-1-part-0\.safetensors {message}: quantized models"):
            scan_checkpoint(LocalSource(at))

    def test_factors_of_a_cache_in_8_bits(self, place):
        at = place("llama/0.25-tp2")
        change(at, 1, model__layers__0__self_attn__attn___k_scale=torch.tensor(0.5))
        with pytest.raises(UnsupportedError, match=r"rank1/model\.layers\.0\.self_attn\.attn\._k_scale .*other values"):
            digest(at)

    def test_experts_in_another_order(self, place):
        """vLLM's `--expert-placement-strategy round_robin`."""
        at = place("mixtral/0.25-tp2-ep2")
        name = "model__layers__0__block_sparse_moe__experts__routed_experts___expert_map"
        change(at, 0, **{name: torch.tensor([0, -1, 1, -1], dtype=torch.int32)})
        with pytest.raises(UnsupportedError, match=r"routed_experts\._expert_map .*other values"):
            digest(at)

    @pytest.mark.parametrize(
        ("owner", "old", "new", "message"),
        [
            ("llama/0.25-tp2", "._prob_scale", "._softmax_scale", "_k_scale in attention, but no _prob_scale"),
            (
                "mixtral/0.25-tp2",
                ".routed_experts",
                "",
                r"_k_scale in attention, but experts called model\.layers\.0\.block_sparse_moe\.experts\.w",
            ),
            ("mixtral/0.11-tp2", ".w13", ".routed_experts.w13", r"experts called .*routed_experts.*, but no _k_scale"),
        ],
    )
    def test_arrays_of_a_version_that_is_not_known(self, place, owner, old, new, message):
        at = place(owner)
        renamed(at, old, new)
        with pytest.raises(UnsupportedError, match=f"no known version of vLLM: .*{message}"):
            scan_checkpoint(LocalSource(at))

    def test_an_array_too_many_and_one_too_few(self, place):
        at = place("llama/0.25-tp2")
        change(at, 1, model__layers__0__extra__weight=torch.ones(2))
        with pytest.raises(UnsupportedError, match=r"has no rank1/model\.layers\.0\.extra\.weight"):
            digest(at)
        change(at, 1, model__layers__0__extra__weight=None, model__layers__1__mlp__gate_up_proj__weight=None)
        with pytest.raises(SourceError, match=r"lacks rank1/model\.layers\.1\.mlp\.gate_up_proj\.weight"):
            digest(at)

    def test_an_array_of_another_shape(self, place):
        at = place("llama/0.25-tp2")
        change(at, 1, model__layers__1__mlp__gate_up_proj__weight=torch.ones(24, 32).bfloat16())
        with pytest.raises(
            SourceError, match=r"gate_up_proj\.weight has shape \[24, 32\], but the model gives it \[48"
        ):
            digest(at)

    def test_copies_of_a_head_that_differ(self, place):
        at = place("llama/0.25-tp8")
        qkv = load_file(at / "model-rank-1-part-0.safetensors")["model.layers.0.self_attn.qkv_proj.weight"]
        qkv[-1] += 1
        change(at, 1, model__layers__0__self_attn__qkv_proj__weight=qkv)
        with pytest.raises(SourceError, match=r"self_attn\.v_proj\.weight: copies differ in 32 elements"):
            digest(at)

    def test_a_bias_that_is_no_zeros(self, place):
        at = place("gpt_oss/0.25-tp2")
        name = "model__layers__0__mlp__experts__routed_experts__w2_bias"
        change(at, 1, **{name: torch.ones(4, 32).bfloat16()})
        with pytest.raises(UnsupportedError, match=r"rank1/.*w2_bias .*other values"):
            digest(at)

    def test_the_last_rank_that_is_missing(self, place):
        """The shapes then are those of another number of ranks."""
        at = place("llama/0.25-tp8")
        (at / "model-rank-7-part-0.safetensors").unlink()
        with pytest.raises(PartitionError, match="tp=7"):
            digest(at)
        for rank in (4, 5, 6):
            (at / f"model-rank-{rank}-part-0.safetensors").unlink()
        with pytest.raises(SourceError, match=r"has shape \[16, 32\], but the model gives it \[32, 32\]"):
            digest(at)

    def test_a_part_that_is_missing_and_one_that_is_double(self, place):
        at = place("llama/0.25-tp2")
        (at / "model-rank-1-part-0.safetensors").rename(at / "model-rank-1-part-1.safetensors")
        with pytest.raises(SourceError, match=r"model-rank-1-part-0\.safetensors is missing"):
            scan_checkpoint(LocalSource(at))
        shutil.copy(at / "model-rank-1-part-1.safetensors", at / "model-rank-1-part-0.safetensors")
        with pytest.raises(SourceError, match=r"is in model-rank-1-part-1\.safetensors and in model-rank-1-part-0"):
            scan_checkpoint(LocalSource(at))

    def test_no_config(self, place):
        at = place("llama/0.25-tp2")
        (at / "config.json").unlink()
        with pytest.raises(SourceError, match="without a config, nothing says which model's tensors"):
            digest(at)
        with open_checkpoint(at, SourceOptions(config=source("llama/"))) as found:
            assert found.model is not None
