"""Megatron-LM's directories of ranks: as megatron-core saves them, read and written to the bit, and refused by name."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from shardctl.base.errors import PartitionError, SourceError, UnsupportedError, UsageError
from shardctl.checkpoint.opening import open_checkpoint
from shardctl.libraries.megatron.family_features import MISSING, TRAITS
from shardctl.libraries.megatron.layers import check_model
from shardctl.libraries.megatron.legacy_writing import MegatronOptions, _find_end_stages
from shardctl.libraries.megatron.model_arguments import convert_config_to_arguments
from shardctl.libraries.megatron.names import find_engine_name, find_local_name
from shardctl.libraries.megatron.ranks import build_least_mesh, list_mesh_folders
from shardctl.libraries.registry import detect_format, scan_checkpoint
from shardctl.models import describe_model
from shardctl.models.families import load_family
from shardctl.options import ReshardOptions, SourceOptions, VerifyOptions
from shardctl.storage.local import LocalSource
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.digest import digest
from shardctl.verbs.inspect import inspect
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

FIXTURES = Path(__file__).parents[2] / "fixtures" / "megatron"
CASES = json.loads((FIXTURES / "cases.json").read_text())
WRITABLE = [name for name, case in CASES.items() if case.get("names") != "premcore"]
"""All but those of before megatron-core, which nothing loads any more."""
UNLIKE = {
    "llama-tp1": {"dtype"},
    "mistral-tp2": {"architectures", "model_type"},  # no arg tells a Mistral from a Llama
    "gpt2-tp2": {"activation_function", "n_inner"},
    "qwen3-5-moe-tp2": {"architectures", "model_type"},
    "seed-oss-tp2": {"architectures", "model_type"},  # which has nothing that a Qwen2 with wider heads has not
    "glm4-moe-tp2": {"num_nextn_predict_layers"},
    "glm4-moe-lite-pp2": {"architectures", "model_type"},  # which is DeepSeek-V3's layers
    "deepseek-v3-tp2": {"num_nextn_predict_layers"},  # the files have no such layer
}
"""What args do not say as the config did."""
LAYERS = {
    "llama-uneven": 4,
    "deepseek-v3-predicting-pp2": 3,
    "glm4-moe-lite-pp2": 3,
    "glm4-moe-predicting-pp2": 3,
    "nemotron-h-moe-pp2": 6,
    "qwen3-5-pp2": 3,
}
FILE = "model_optim_rng.pt"


class _Stub:
    """What megatron-core's enums are without it."""

    def __init__(self, *_: object) -> None:
        pass


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        return _Stub if module.startswith("megatron.") else super().find_class(module, name)


class _Pickle:
    Unpickler = _Unpickler


def load(path: Path) -> dict:
    """A rank's file, as torch has it."""
    return torch.load(path, weights_only=False, pickle_module=_Pickle)


def models(saved: dict) -> dict[str, dict]:
    return {key: value for key, value in saved.items() if key.startswith("model")}


def source_options(name: str) -> SourceOptions:
    if name == "qwen3-5-moe-tp2":  # whose args are Qwen3-Next's
        return SourceOptions(config=source(name))
    return SourceOptions(true_vocab=None if CASES[name].get("vocabulary") else 100)


def source(name: str) -> Path:
    """The model of transformers that a case is made of."""
    return FIXTURES / "hf" / CASES[name]["model"]


def reshard_options(name: str) -> ReshardOptions:
    """What makes a case of its model."""
    case = CASES[name]
    mesh = {"tp": 1, "ep": 1, **case["mesh"]}
    chunks, first = mesh.pop("vp", None), mesh.pop("first", None)
    etp = mesh.pop("etp", mesh["tp"])
    engine = case.get("names") == "te"
    said = ["multiple=16", f"layers={'transformer-engine' if engine else 'local'}"]
    said += ["experts=grouped"] if case.get("grouped") or (engine and "moe" in name) else []
    said += [f"virtual={chunks}"] if chunks else []
    said += ["core=0.16"] if case.get("core") != 19 and ("predicting" in name or "nemotron-h" in name) else []
    said += ["padding=last-row"] if case.get("padding") == "last" else []
    return ReshardOptions(
        to="megatron",
        mesh=Mesh.of(**mesh, etp=etp, dp=max(mesh["tp"], mesh["ep"] * etp) // mesh["tp"]),
        stages=f"1,{LAYERS[name] - 1}" if first else None,
        megatron=",".join(said),
        dtype="fp32" if case.get("dtype") else "keep",
    )


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


@pytest.fixture
def written(tmp_path):
    """A directory that is there to be damaged: two tp ranks, two ep ranks, four experts."""
    out = tmp_path / "written"
    reshard(
        FIXTURES / "hf" / "qwen3-moe",
        out,
        ReshardOptions(to="megatron", mesh=Mesh.of(tp=2, ep=2, etp=1), megatron="multiple=16"),
    )
    (out / "config.json").unlink()
    (out / "shardctl.json").unlink()
    return out


def change(at: Path, without: tuple[str, ...] = (), **changed: object) -> None:
    """Change every rank's file; `args_...` are changes of its args, and those in `without` are not there."""
    for path in at.rglob(FILE):
        saved = load(path)
        for key in without:
            delattr(saved["args"], key)
        for key, value in changed.items():
            if key.startswith("args_"):
                setattr(saved["args"], key.removeprefix("args_"), value)
            else:
                saved[key] = value
        torch.save(saved, path)


class TestReading:
    @pytest.mark.parametrize("name", CASES)
    def test_its_digest_is_the_models_and_nothing_is_wrong_with_it(self, name):
        if not CASES[name].get("dtype"):
            assert digest(FIXTURES / name, source_options=source_options(name)).digest == digest(source(name)).digest
        assert verify(FIXTURES / name, source_options=source_options(name)).ok

    @pytest.mark.parametrize("name", CASES)
    def test_what_the_owner_saves_is_the_model_bit_for_bit(self, name, tmp_path):
        reshard(FIXTURES / name, tmp_path / "hf", ReshardOptions(to="hf"), source_options=source_options(name))
        ours, theirs = (load_file(at / "model.safetensors") for at in (tmp_path / "hf", source(name)))
        if CASES[name].get("dtype"):
            theirs = {key: value.float() for key, value in theirs.items()}
        assert ours.keys() == theirs.keys()
        assert [key for key in theirs if not same(ours[key], theirs[key])] == []

    @pytest.mark.parametrize("name", CASES)
    def test_the_config_is_that_of_the_model(self, name):
        made = scan_checkpoint(LocalSource(FIXTURES / name)).own_config.values
        config = json.loads((source(name) / "config.json").read_text())
        config |= {"rope_theta": config.get("rope_parameters", {}).get("rope_theta")}
        unlike = {key for key in made.keys() & config.keys() if made[key] != config[key]}
        vocabulary = set() if CASES[name].get("vocabulary") else {"vocab_size"}
        assert unlike == UNLIKE.get(name, set()) | vocabulary

    def test_the_mesh_and_the_stages_are_known(self):
        found = scan_checkpoint(LocalSource(FIXTURES / "llama-vp2-pp2")).dialect
        assert (str(found.mesh), found.stages, found.facts["layers"]) == ("pp2", (2, 2), (1, 1, 1, 1))
        assert scan_checkpoint(LocalSource(FIXTURES / "llama-uneven")).dialect.stages == (1, 3)
        experts = scan_checkpoint(LocalSource(FIXTURES / "qwen3-moe-ep2-etp1")).dialect
        assert (experts.mesh.ep, experts.mesh.etp) == (2, 1)
        assert list(experts.ranks.values()) == ["mp_rank_00_000/", "mp_rank_01_001/"]
        assert (
            inspect(FIXTURES / "llama-tp2-pp2", source_options=SourceOptions(true_vocab=100)).architecture
            == "LlamaForCausalLM"
        )

    @pytest.mark.parametrize("name", ["qwen3-moe-ep2-etp1", "qwen3-moe-ep2-etp2", "mixtral-grouped", "deepseek-v3-tp2"])
    def test_shapes_say_over_how_many_ranks_experts_are_divided_where_args_do_not(self, name, tmp_path):
        shutil.copytree(FIXTURES / name, tmp_path / "old")
        change(tmp_path / "old", without=("expert_tensor_parallel_size",))
        found = scan_checkpoint(LocalSource(tmp_path / "old"))
        assert found.dialect.mesh == scan_checkpoint(LocalSource(FIXTURES / name)).dialect.mesh
        assert [warning for warning in found.warnings if "etp" in warning] == []
        assert digest(tmp_path / "old", source_options=source_options(name)).digest == digest(source(name)).digest

    def test_where_shapes_do_not_say_it_either_an_option_does(self, tmp_path):
        name, config = "qwen3-moe-ep2-etp1", FIXTURES / "hf" / "qwen3-moe" / "config.json"
        shutil.copytree(FIXTURES / name, tmp_path / "old")
        change(tmp_path / "old", without=("expert_tensor_parallel_size", "moe_ffn_hidden_size", "ffn_hidden_size"))
        with pytest.raises(SourceError, match="mp_rank_01_000 and 1 more folder") as raised:
            scan_checkpoint(LocalSource(tmp_path / "old"))
        assert "--source-etp" in raised.value.hint
        said = SourceOptions(config=config, source_etp=1)
        assert digest(tmp_path / "old", source_options=said).digest == digest(source(name)).digest
        with pytest.raises(UsageError, match="--source-etp 1 was given, but safetensors files say how"):
            digest(source(name), source_options=SourceOptions(source_etp=1))

    def test_a_degree_that_is_assumed_is_said(self, tmp_path):
        shutil.copytree(FIXTURES / "qwen3-moe-ep2-etp2", tmp_path / "old")
        change(tmp_path / "old", without=("expert_tensor_parallel_size", "moe_ffn_hidden_size", "ffn_hidden_size"))
        assert "etp=2 is assumed" in " ".join(scan_checkpoint(LocalSource(tmp_path / "old")).warnings)

    def test_a_part_that_is_no_fraction_of_an_expert_is_refused(self, tmp_path):
        shutil.copytree(FIXTURES / "qwen3-moe-ep2-etp1", tmp_path / "old")
        change(tmp_path / "old", without=("expert_tensor_parallel_size",), args_moe_ffn_hidden_size=20)
        with pytest.raises(SourceError, match="is no part of experts of 20, as the args say"):
            scan_checkpoint(LocalSource(tmp_path / "old"))

    def test_one_iteration_is_read_and_others_are_said_to_be_left(self, tmp_path):
        shutil.copytree(FIXTURES / "llama-tp4", tmp_path, dirs_exist_ok=True)
        shutil.copytree(tmp_path / "iter_0000010", tmp_path / "iter_0000008")
        assert "iter_0000008 is left behind" in scan_checkpoint(LocalSource(tmp_path)).warnings[-1]
        (tmp_path / "latest_checkpointed_iteration.txt").unlink()
        with pytest.raises(SourceError, match="several iterations and no latest_checkpointed_iteration"):
            scan_checkpoint(LocalSource(tmp_path))
        assert detect_format(LocalSource(tmp_path / "iter_0000008")).name == "megatron"
        assert len(scan_checkpoint(LocalSource(tmp_path / "iter_0000008")).files) == 4

    def test_what_trains_is_left_behind_and_said_so(self):
        found = scan_checkpoint(LocalSource(FIXTURES / "llama-trained"))
        assert any("the optimizer's states are left behind: " in text for text in found.warnings)
        left = {each.name for each in found.objects if each.policy == "drop"}
        assert {"optimizer", "rng_state", "iter_0000010/mp_rank_00/distrib_optim.pt"} <= left
        assert all(each.policy == "drop" for each in found.objects)
        engine = scan_checkpoint(LocalSource(FIXTURES / "llama-te"))
        assert any("_extra_state of Transformer Engine's layers" in note for note in engine.training.notes)

    def test_layers_that_predict_further_tokens_are_left_behind(self, written, tmp_path):
        change(written, args_mtp_num_layers=1)
        path = written / "release" / "mp_rank_00_000" / FILE
        saved = load(path)
        saved["model"]["mtp.layers.0.enorm.weight"] = torch.ones(32)
        torch.save(saved, path)
        back = reshard(written, tmp_path / "hf", ReshardOptions(to="hf"))
        assert any("left behind: 1 array of layers that predict further tokens" in text for text in back.warnings)
        assert back.record.digest == digest(FIXTURES / "hf" / "qwen3-moe").digest

    def test_the_oldest_name_of_the_degree_of_tp(self, written):
        for path in written.rglob(FILE):
            saved = load(path)
            saved["args"].model_parallel_size = saved["args"].__dict__.pop("tensor_model_parallel_size")
            torch.save(saved, path)
        assert scan_checkpoint(LocalSource(written)).dialect.mesh.degree("tp") == 2

    def test_another_config_overrides_the_args(self, tmp_path):
        made = reshard(
            FIXTURES / "mistral-tp2",
            tmp_path / "hf",
            ReshardOptions(to="hf"),
            source_options=SourceOptions(config=source("mistral-tp2")),
        )
        assert made.record.digest == digest(source("mistral-tp2")).digest


class TestWriting:
    @pytest.mark.parametrize("name", WRITABLE)
    def test_every_array_is_the_owners(self, name, tmp_path):
        reshard(source(name), tmp_path / "out", reshard_options(name))
        theirs = {path.parent.name: load(path) for path in (FIXTURES / name).rglob(FILE)}
        ours = {path.parent.name: load(path) for path in (tmp_path / "out" / "release").rglob(FILE)}
        assert ours.keys() == theirs.keys()
        for folder, saved in theirs.items():
            assert models(ours[folder]).keys() == models(saved).keys()
            for chunk, arrays in models(saved).items():
                mine = ours[folder][chunk]
                kept = CASES[name].get("names") != "te"  # whose layers make their extra states anew
                wanted = [key for key in arrays if kept or not key.endswith("_extra_state")]
                assert sorted(mine) == sorted(wanted)
                assert [key for key in wanted if not same(mine[key], arrays[key])] == []
        assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text() == "release"

    @pytest.mark.parametrize("name", WRITABLE)
    def test_the_args_say_what_the_owners_say(self, name, tmp_path):
        reshard(source(name), tmp_path / "out", reshard_options(name))
        path = next((tmp_path / "out").rglob(FILE))
        ours, theirs = (
            vars(load(at)["args"]) for at in (path, FIXTURES / name / "iter_0000010" / path.parent.name / FILE)
        )
        unlike = {key for key in ours.keys() & theirs.keys() if ours[key] != theirs[key]}
        assert unlike <= {"vocab_size", "iteration"} | (
            {"moe_grouped_gemm"} if name in {"llama-te", "qwen3-5-pp2", "qwen3-5-predicting-tp2"} else set()
        )
        assert ours["vocab_size"] == 100

    def test_one_mesh_becomes_another_byte_for_byte(self, tmp_path):
        given = source_options("llama-tp2-pp2")
        reshard(FIXTURES / "llama-tp2-pp2", tmp_path / "out", reshard_options("llama-tp4"), source_options=given)
        for path in (FIXTURES / "llama-tp4").rglob(FILE):
            mine = load(tmp_path / "out" / "release" / path.parent.name / FILE)["model"]
            assert all(same(mine[key], value) for key, value in load(path)["model"].items())

    @pytest.mark.parametrize("name", ["qwen3_5_moe", "qwen3_vl"])
    def test_the_text_model_of_one_that_sees(self, name, tmp_path):
        at = FIXTURES.parent / "vllm" / name / "hf"
        made = ReshardOptions(to="megatron", mesh=Mesh.of(tp=2), only="text", dtype="fp32")
        text = reshard(at, tmp_path / "text", ReshardOptions(to="hf", only="text", dtype="fp32")).record.digest
        assert reshard(at, tmp_path / "out", made).record.digest == text
        assert digest(tmp_path / "out").digest == text

    def test_a_norm_behind_gated_delta_net_is_not_rounded(self, tmp_path):
        """4 elements of one layer are refused and 2 of another, whichever a thread comes to first."""
        at = FIXTURES.parent / "vllm" / "qwen3_5_moe" / "hf"
        message = r"out_norm\.weight: [24] of its elements cannot be stored as gamma-1"
        with pytest.raises(UnsupportedError, match=message):
            reshard(at, tmp_path / "out", ReshardOptions(to="megatron", only="text"))

    def test_gated_delta_net_is_not_written_for_megatron_fsdp(self, tmp_path):
        with pytest.raises(UnsupportedError, match="what Megatron-FSDP calls the parts of gated DeltaNet is not known"):
            reshard(FIXTURES / "hf" / "qwen3-next", tmp_path / "out", ReshardOptions(to="fsdp_dtensor"))

    def test_transformer_engines_names_are_the_usual_ones(self, tmp_path):
        reshard(source("llama-tp1"), tmp_path / "out", ReshardOptions(to="megatron"))
        saved = torch.load(tmp_path / "out" / "release" / "mp_rank_00" / FILE, weights_only=False)
        assert "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight" in saved["model"]
        assert saved["args"].transformer_impl == "transformer_engine"
        assert saved["args"].padded_vocab_size == 128
        assert saved["model"]["embedding.word_embeddings.weight"].shape == (128, 32)

    def test_a_rank_may_have_nothing_of_the_vocabulary_but_padding(self, tmp_path):
        out = tmp_path / "out"
        reshard(source("llama-tp1"), out, ReshardOptions(to="megatron", mesh=Mesh.of(tp=4), megatron="multiple=128"))
        rows = [load(out / "release" / f"mp_rank_{n:02d}" / FILE)["model"]["output_layer.weight"] for n in range(4)]
        assert [bool(part.any()) for part in rows] == [True, False, False, False]

    def test_a_rank_of_copies_of_the_last_row_is_refused(self, tmp_path):
        wanted = ReshardOptions(to="megatron", mesh=Mesh.of(tp=4), megatron="padding=last-row")
        with pytest.raises(PartitionError, match="padding 100 tokens to 512 rows would leave ranks with only copies"):
            reshard(source("llama-tp1"), tmp_path / "out", wanted)

    def test_a_sliding_window_travels_in_the_args(self, tmp_path):
        at = tmp_path / "mistral"
        shutil.copytree(FIXTURES / "hf" / "mistral", at)
        config = json.loads((at / "config.json").read_text()) | {"sliding_window": 16}
        (at / "config.json").write_text(json.dumps(config))
        reshard(at, tmp_path / "out", ReshardOptions(to="megatron"))
        assert load(tmp_path / "out" / "release" / "mp_rank_00" / FILE)["args"].window_size == (15, 0)
        made = scan_checkpoint(LocalSource(tmp_path / "out")).own_config.values
        assert (made["model_type"], made["sliding_window"]) == ("mistral", 16)

    def test_layers_that_predict_further_tokens_are_left_and_said_so(self, tmp_path):
        at = tmp_path / "model"
        shutil.copytree(source("deepseek-v3-tp2"), at)
        arrays = load_file(at / "model.safetensors")
        arrays["model.layers.3.enorm.weight"] = torch.ones(32, dtype=torch.bfloat16)
        save_file(arrays, at / "model.safetensors", {"format": "pt"})
        made = reshard(at, tmp_path / "out", ReshardOptions(to="megatron"))
        assert any("layers that predict further tokens are left behind" in warning for warning in made.warnings)

    @pytest.mark.parametrize("lacking", ["mtp.norm.weight", "mtp.layers.0.mlp.experts.3.up_proj.weight"])
    def test_qwens_layer_that_predicts_is_left_if_it_is_not_whole(self, lacking, tmp_path):
        at = tmp_path / "model"
        shutil.copytree(FIXTURES / "hf" / "qwen3-next-predicting", at)
        arrays = load_file(at / "model.safetensors")
        del arrays[lacking]
        save_file(arrays, at / "model.safetensors", {"format": "pt"})
        made = reshard(at, tmp_path / "out", ReshardOptions(to="megatron"))
        assert any("layers that predict further tokens are left behind" in warning for warning in made.warnings)
        assert not [name for name in load(next((tmp_path / "out").rglob(FILE)))["model"] if name.startswith("mtp.")]

    @pytest.mark.parametrize("layout", ["megatron", "torch_dist"])
    @pytest.mark.parametrize("trained", [False, True])
    def test_copies_of_the_embedding_and_the_head_are_compared_and_left(self, layout, trained, tmp_path):
        at, new = tmp_path / "model", "model.layers.3."
        shutil.copytree(source("deepseek-v3-predicting-pp2"), at)
        arrays = load_file(at / "model.safetensors")
        arrays[f"{new}embed_tokens.weight"] = arrays["model.embed_tokens.weight"].clone()
        arrays[f"{new}shared_head.head.weight"] = arrays["lm_head.weight"].clone()
        if trained:
            arrays[f"{new}shared_head.head.weight"][99] += 1
        save_file(arrays, at / "model.safetensors", {"format": "pt"})
        made = reshard(at, tmp_path / "out", ReshardOptions(to=layout, mesh=Mesh.of(tp=2)))
        alike = next(text for text in made.warnings if "use the model's own embedding and head" in text)
        assert "model.layers.3.embed_tokens.weight" in alike
        assert ("shared_head.head" in alike) is not trained
        unlike = [text for text in made.warnings if "what these layers predict changes" in text]
        assert [text.partition(" differ")[0] for text in unlike] == [f"{new}shared_head.head.weight"] * trained
        reshard(tmp_path / "out", tmp_path / "back", ReshardOptions(to="hf"), source_options=SourceOptions())
        back = load_file(tmp_path / "back" / "model.safetensors")
        assert arrays.keys() - back.keys() == {f"{new}embed_tokens.weight", f"{new}shared_head.head.weight"}
        assert all(same(value, arrays[name]) for name, value in back.items())
        verified = verify(tmp_path / "out", VerifyOptions(against=str(at), level="full"))
        assert verified.ok

    def test_newer_cores_have_another_name_for_the_layer_proper(self, tmp_path):
        model = source("deepseek-v3-predicting-pp2")
        reshard(model, tmp_path / "out", ReshardOptions(to="megatron", megatron="layers=local"))
        saved = load(tmp_path / "out" / "release" / "mp_rank_00" / FILE)
        assert "mtp.layers.0.mtp_model_layer.mlp.router.weight" in saved["model"]
        assert not any("transformer_layer" in name for name in saved["model"])
        assert saved["args"].mtp_num_layers == 1
        assert digest(tmp_path / "out").digest == digest(model).digest


class TestRefusals:
    def test_a_download_that_has_not_ended(self, tmp_path):
        where = shutil.copytree(FIXTURES / "llama-tp2-pp2", tmp_path / "llama")
        file = next(where.rglob(FILE))
        file.with_name(f"{FILE}.aria2").write_bytes(b"")
        with pytest.raises(SourceError, match=r"is not completely downloaded"):
            scan_checkpoint(LocalSource(where))

    def test_a_missing_diagonal_folder_is_named(self, written):
        shutil.rmtree(written / "release" / "mp_rank_01_001")
        with pytest.raises(SourceError, match=r"release/mp_rank_01_001 is missing: the args say tp=2, pp=1, ep=2"):
            scan_checkpoint(LocalSource(written))

    def test_a_folder_too_many_is_named(self, written):
        shutil.copytree(written / "release" / "mp_rank_01_001", written / "release" / "mp_rank_02_000")
        with pytest.raises(SourceError, match="mp_rank_02_000 is there, but the args say"):
            scan_checkpoint(LocalSource(written))

    def test_what_glm_rotates_if_its_config_says_nothing(self, tmp_path):
        shutil.copytree(FIXTURES / "hf" / "glm4-moe", tmp_path / "hf")
        config = json.loads((tmp_path / "hf" / "config.json").read_text())
        del config["rope_parameters"]["partial_rotary_factor"]
        (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
        reshard(tmp_path / "hf", tmp_path / "out", ReshardOptions(to="megatron"))
        assert load(next((tmp_path / "out").rglob(FILE)))["args"].rotary_percent == 0.5

    def test_sigmoids_that_are_not_divided_by_their_sum(self, tmp_path):
        shutil.copytree(FIXTURES / "hf" / "glm4-moe", tmp_path / "hf")
        config = json.loads((tmp_path / "hf" / "config.json").read_text())
        (tmp_path / "hf" / "config.json").write_text(json.dumps({**config, "norm_topk_prob": False}))
        with pytest.raises(UnsupportedError, match="divides the sigmoids of chosen experts by their sum"):
            reshard(tmp_path / "hf", tmp_path / "out", ReshardOptions(to="megatron"))

    @pytest.mark.parametrize("version", [1.5, 4.0, "new"])
    def test_an_unknown_version(self, written, version):
        change(written, checkpoint_version=version)
        with pytest.raises(UnsupportedError, match="checkpoint_version that is not known"):
            scan_checkpoint(LocalSource(written))

    def test_a_vocabulary_that_cannot_be_known(self, written, tmp_path):
        change(written, args_vocab_size=None)
        with pytest.raises(SourceError, match="how many tokens the vocabulary has") as caught:
            reshard(written, tmp_path / "hf", ReshardOptions(to="hf"))
        assert "--true-vocab N" in caught.value.hint
        given = SourceOptions(true_vocab=100)
        back = reshard(written, tmp_path / "hf", ReshardOptions(to="hf"), source_options=given)
        assert back.record.digest == digest(FIXTURES / "hf" / "qwen3-moe").digest

    def test_args_that_contradict_the_arrays(self, written, tmp_path):
        change(written, args_hidden_size=64)
        with pytest.raises(SourceError, match="has shape"):
            reshard(written, tmp_path / "hf", ReshardOptions(to="hf"))
        change(written, args_num_layers=3)
        with pytest.raises(SourceError, match=r"the files hold 2 layers, but the args of .* say 3"):
            scan_checkpoint(LocalSource(written))
        change(written, args_tensor_model_parallel_size="two")
        with pytest.raises(SourceError, match="tensor_model_parallel_size 'two' among its args, which is not a degree"):
            scan_checkpoint(LocalSource(written))

    def test_args_of_a_model_that_no_config_describes(self, written, tmp_path):
        change(written, args_hybrid_override_pattern="M*M*")
        with pytest.raises(
            SourceError, match="without a config, nothing says which model's tensors are in these arrays"
        ):
            reshard(written, tmp_path / "hf", ReshardOptions(to="hf"))

    def test_files_of_two_checkpoints(self, written):
        path = written / "release" / "mp_rank_01_001" / FILE
        saved = load(path)
        saved["checkpoint_version"] = 2.0
        torch.save(saved, path)
        with pytest.raises(SourceError, match=r"has checkpoint_version 2, but .* 3"):
            scan_checkpoint(LocalSource(written))

    def test_no_args(self, written):
        change(written, args=None)
        with pytest.raises(SourceError, match="has no args of Megatron-LM, so its mesh is not known"):
            scan_checkpoint(LocalSource(written))

    def test_a_tracker_that_names_what_is_not_there(self, written):
        (written / "latest_checkpointed_iteration.txt").write_text("30")
        with pytest.raises(SourceError, match=r"names iter_0000030, but only .* has files of ranks"):
            scan_checkpoint(LocalSource(written))

    @pytest.mark.parametrize(
        ("wanted", "message"),
        [
            (ReshardOptions(mesh=Mesh.of(tp=3)), "cannot be divided over tp=3"),
            (ReshardOptions(mesh=Mesh.of(pp=3)), "4 layers cannot be divided evenly over 3 stages"),
            (
                ReshardOptions(mesh=Mesh.of(pp=4), stages="1,1,1,1", megatron="virtual=2"),
                "virtual=2 needs --pp and excludes --stages",
            ),
            (ReshardOptions(mesh=Mesh.of(tp=2, fsdp=2)), "not of fsdp"),
            (ReshardOptions(megatron="layers=flash"), "cannot read part 'layers=flash' of --megatron"),
        ],
    )
    def test_a_mesh_that_does_not_fit(self, wanted, message, tmp_path):
        wanted = ReshardOptions(to="megatron", mesh=wanted.mesh, stages=wanted.stages, megatron=wanted.megatron)
        with pytest.raises(UsageError, match=message):
            reshard(source("llama-tp1"), tmp_path / "out", wanted)

    def test_stages_that_differ_are_the_first_and_the_last(self, tmp_path):
        model = FIXTURES / "hf" / "llama"
        reshard(model, tmp_path / "good", ReshardOptions(to="megatron", mesh=Mesh.of(pp=3), stages="2,1,1"))
        args = load(tmp_path / "good" / "release" / "mp_rank_00_000" / FILE)["args"]
        assert (args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers) == (2, None)
        assert _find_end_stages((3, 3, 3)) == (None, None)
        assert _find_end_stages((1, 3)) == (1, None)
        assert _find_end_stages((1, 3, 3, 2)) == (1, 2)
        with pytest.raises(PartitionError, match="1,2,3,1 differ in the middle"):
            _find_end_stages((1, 2, 3, 1))

    @pytest.mark.parametrize(
        ("family", "architecture", "message"),
        [
            ("granite", "GraniteForCausalLM", "arrays of GraniteForCausalLM are not known here"),
            (
                "gemma",
                "GemmaForCausalLM",
                "no layers for GemmaForCausalLM: the model has embeddings that are multiplied",
            ),
        ],
    )
    def test_models_that_have_other_arrays(self, family, architecture, message, tmp_path):
        at = tmp_path / family
        shutil.copytree(FIXTURES / "hf" / "llama", at)
        config = json.loads((at / "config.json").read_text())
        config |= {"model_type": family, "architectures": [architecture]}
        (at / "config.json").write_text(json.dumps(config))
        with pytest.raises(UnsupportedError, match=message):
            reshard(at, tmp_path / "out", ReshardOptions(to="megatron"))

    def test_routers_that_core_has_with_sigmoids_only(self):
        config = json.loads((FIXTURES.parent / "configs" / "ernie4_5_moe.json").read_text())
        with pytest.raises(UnsupportedError, match="has routers that choose by softmaxes and a bias"):
            check_model(describe_model(config))

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("falcon_h1", "Mamba and attention side by side in each layer, for which Megatron-Bridge"),
            ("granitemoehybrid", "sums of which one part is multiplied"),
            ("jamba", "layers of Mamba 1, where its layers are of Mamba 2"),
            ("lfm2", "short convolutions"),
            ("zamba2", "attention and an MLP that several layers share, with adapters for each"),
        ],
    )
    def test_hybrids_that_core_has_no_layers_for(self, name, message):
        config = json.loads((FIXTURES.parent / "configs" / f"{name}.json").read_text())
        with pytest.raises(UnsupportedError, match=f"core has no layers for .*: the model has {message}"):
            check_model(describe_model(config))

    def test_what_core_lacks_is_said_of_families_that_are_known_and_not_written(self):
        assert [name for name in MISSING if load_family(name) is None] == []
        assert MISSING.keys() & TRAITS.keys() == set()

    @pytest.mark.parametrize(
        ("model", "changed", "message"),
        [
            ("llama", {"hidden_act": "gelu"}, "no activation 'gelu'"),
            (
                "llama",
                {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
                "rotary embeddings of type 'linear'",
            ),
            ("arcee", {"hidden_act": "silu"}, "no activation 'silu'"),
            ("phi3", {"rope_parameters": {"rope_type": "longrope"}}, "rotary embeddings of type 'longrope'"),
            ("deepseek-v3", {"topk_group": 2}, "by the 1 best experts of each"),
            ("glm4-moe-lite", {"rope_interleave": False}, "turns neighbours in latent attention"),
            ("dots1", {"norm_topk_prob": False}, "divides the sigmoids"),
        ],
    )
    def test_what_the_args_cannot_say(self, model, changed, message, tmp_path):
        at = tmp_path / model
        shutil.copytree(FIXTURES / "hf" / model, at)
        config = json.loads((at / "config.json").read_text()) | changed
        (at / "config.json").write_text(json.dumps(config))
        with pytest.raises(UnsupportedError, match=message):
            reshard(at, tmp_path / "out", ReshardOptions(to="megatron"))

    @pytest.mark.parametrize("model", ["deepseek-v3", "dots1", "glm4-moe", "glm4-moe-lite"])
    def test_a_silent_config_means_what_its_class_assumes(self, model):
        kind = AutoConfig.from_pretrained(FIXTURES / "hf" / model)
        said = {"n_routed_experts": 16, "num_hidden_layers": 3}
        said |= {"num_experts_per_tok": 8, "n_shared_experts": 1, "norm_topk_prob": True} if model == "dots1" else {}
        whole = type(kind)(**said, architectures=kind.architectures).to_dict()
        sparse = said | {"model_type": kind.model_type, "architectures": kind.architectures}
        built = [convert_config_to_arguments(config, describe_model(config)) for config in (whole, sparse)]
        unlike = {name: (value, built[1][name]) for name, value in built[0].items() if value != built[1][name]}
        assert unlike.keys() <= {"max_position_embeddings"}


class TestNames:
    def test_engine_names_are_undone(self):
        for name in ("input_layernorm.weight", "pre_mlp_layernorm.weight", "mlp.linear_fc1.weight"):
            full = f"decoder.layers.3.{name}"
            for experts in (True, False):
                assert find_local_name(find_engine_name(full, experts=experts, latent=False)) == full
        expert = "decoder.layers.0.mlp.experts.local_experts.12.linear_fc2.weight"
        grouped = find_engine_name(expert, experts=True, latent=False, grouped=True)
        assert grouped == "decoder.layers.0.mlp.experts.linear_fc2.weight12"
        assert find_local_name(grouped) == expert
        latent = "decoder.layers.0.self_attention.q_layernorm.weight"
        assert find_engine_name(latent, experts=False, latent=False) == latent
        assert find_local_name(find_engine_name(latent, experts=False, latent=True)) == latent

    def test_folders(self):
        assert list(list_mesh_folders(build_least_mesh(tp=2, pp=1, ep=2, etp=1))) == [
            "mp_rank_00_000",
            "mp_rank_01_001",
        ]
        assert list(list_mesh_folders(build_least_mesh(tp=1, pp=2, ep=1, etp=1))) == [
            "mp_rank_00_000",
            "mp_rank_00_001",
        ]
        for tp, ep, etp in ((2, 2, 2), (4, 2, 1), (2, 3, 1), (4, 4, 2), (6, 4, 3)):
            mesh = build_least_mesh(tp=tp, pp=2, ep=ep, etp=etp)
            assert len(set(list_mesh_folders(mesh))) == mesh.world, "each rank has a folder of its own"
        with pytest.raises(UnsupportedError, match="etp=2 does not divide tp=1"):
            list_mesh_folders(build_least_mesh(tp=1, pp=1, ep=2, etp=2))

    def test_args_that_say_endless_ranks_are_refused_at_once(self, written):
        change(written, args_pipeline_model_parallel_size=1 << 19, args_expert_model_parallel_size=1 << 19)
        with pytest.raises(SourceError, match=r"impossible args: a mesh of 2[0-9,]+ ranks is larger"):
            scan_checkpoint(LocalSource(written))

    def test_what_is_asked_for(self):
        assert MegatronOptions.parse("") == MegatronOptions()
        with pytest.raises(UsageError, match="virtual=0"):
            MegatronOptions.parse("virtual=0")
        with pytest.raises(UsageError, match="layers=local"):
            MegatronOptions.parse("layers=local,layers=local")


class TestHybrids:
    """Nemotron-H beyond what the cases show."""

    def write(self, tmp_path: Path, mesh: Mesh | None = None, said: str = "", **more: str) -> Path:
        out = tmp_path / "out"
        at = FIXTURES / "hf" / "nemotron-h"
        reshard(at, out, ReshardOptions(to="megatron", mesh=mesh or Mesh.of(), megatron=said, **more))
        return out

    def config(self, tmp_path: Path, **changed: object) -> Path:
        """Copy a small config, changed, without weights."""
        config = json.loads((FIXTURES.parent / "configs" / "nemotron_h.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | {"use_bias": False, "mlp_bias": False} | changed))
        return tmp_path

    @pytest.mark.parametrize(("core", "name"), [("", "conv1d_weight"), ("core=0.17", "conv1d.weight")])
    def test_the_convolution_is_no_module_in_newer_cores(self, core, name, tmp_path):
        out = self.write(tmp_path, said=core)
        assert f"decoder.layers.0.mixer.{name}" in load(next(out.rglob(FILE)))["model"]
        assert digest(out).digest == digest(FIXTURES / "hf" / "nemotron-h").digest

    def test_patterns_say_stages_of_any_number_of_layers_to_newer_cores(self, tmp_path):
        out = self.write(tmp_path, Mesh.of(pp=3), "core=0.17", stages="1,2,3")
        args = load(next(out.rglob(FILE)))["args"]
        assert (args.hybrid_layer_pattern, args.hybrid_override_pattern) == ("M|E*|M-E", "ME*M-E")
        assert args.decoder_first_pipeline_num_layers is None
        assert digest(out).digest == digest(FIXTURES / "hf" / "nemotron-h").digest
        with pytest.raises(PartitionError, match="--stages 1,1,3,1 differ in the middle"):
            self.write(tmp_path / "older", Mesh.of(pp=4), "core=0.16", stages="1,1,3,1")

    @pytest.mark.parametrize("said", ["layers=local", "core=0.16,virtual=3"])
    def test_what_core_has_not_around_mamba(self, said, tmp_path):
        with pytest.raises(UsageError, match=r"megatron-core (has Mamba between|0.16 has no virtual)"):
            self.write(tmp_path, Mesh.of(pp=2), said)

    def test_groups_of_heads_stay_whole(self, tmp_path):
        with pytest.raises(PartitionError, match=r"2 groups of 4 heads \(64 channels\) cannot be divided over tp=4"):
            self.write(tmp_path, Mesh.of(tp=4))

    def test_the_name_that_norms_have_where_they_are_modules(self, tmp_path):
        out = self.write(tmp_path)
        path = next(out.rglob(FILE))
        saved = load(path)
        model = saved["model"]
        for name in [name for name in model if name.endswith("in_proj.layer_norm_weight")]:
            model[name.replace("mixer.in_proj.layer_norm_", "norm.")] = model.pop(name)
        torch.save(saved, path)
        assert digest(out).digest == digest(FIXTURES / "hf" / "nemotron-h").digest

    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            ({"use_bias": True}, r"biases in the projections of all layers but Mamba's or in none, .*in_proj\.bias"),
            ({"mlp_bias": True}, r"this model has model\.layers\.1\.mixer\..*bias"),
            ({"use_conv_bias": False}, r"no convolution without a bias, and this model has .*conv1d\.weight"),
            ({"conv_kernel": 3}, r"convolutions over 4 tokens, but .* is over 3"),
        ],
    )
    def test_arrays_that_core_has_not(self, changed, message, tmp_path):
        said = json.loads((self.config(tmp_path, **changed) / "config.json").read_text())
        with pytest.raises(UnsupportedError, match=message):
            check_model(describe_model(said))

    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            ({"layer_norm_epsilon": 1e-6}, "an epsilon of 1e-05 in the norm behind Mamba, but this config has 1e-06"),
            ({"mlp_hidden_act": "silu"}, "no mlp_hidden_act 'silu'"),
            ({"mamba_hidden_act": "gelu"}, "no mamba_hidden_act 'gelu'"),
            ({"norm_topk_prob": False}, "by their sum, which this config does not"),
            ({"num_experts_per_tok": 1}, "but not that of one alone, which this config does"),
        ],
    )
    def test_what_the_args_cannot_say(self, changed, message, tmp_path):
        said = json.loads((self.config(tmp_path, **changed) / "config.json").read_text())
        with pytest.raises(UnsupportedError, match=message):
            convert_config_to_arguments(said, describe_model(said))

    @pytest.mark.parametrize(
        "changed",
        [
            {"hybrid_override_pattern": "MG*M-E"},
            {"hybrid_override_pattern": None, "hybrid_attention_ratio": 0.5},
            {"swiglu": True},
            {"position_embedding_type": "rope"},
        ],
    )
    def test_hybrids_that_are_no_nemotron_h_are_not_described(self, changed, tmp_path):
        out = self.write(tmp_path)
        change(out, without=("hybrid_layer_pattern",), **{f"args_{key}": value for key, value in changed.items()})
        assert scan_checkpoint(LocalSource(out)).own_config is None
        for name in ("config.json", "shardctl.json"):
            (out / name).unlink()
        with pytest.raises(UsageError, match="say too little to make one of") as error:
            inspect(out, source_options=SourceOptions(true_vocab=100))
        assert "--config PATH" in error.value.hint

    def test_norms_that_are_stored_less_one_are_refused(self, tmp_path):
        out = self.write(tmp_path)
        change(out, args_apply_layernorm_1p=True)
        with pytest.raises(UnsupportedError, match="hybrid models with norms that are stored less one are not known"):
            digest(out, source_options=SourceOptions(config=FIXTURES / "hf" / "nemotron-h"))

    def test_megatron_fsdp_is_refused(self, tmp_path):
        with pytest.raises(UnsupportedError, match="calls the parts of Mamba is not known"):
            reshard(FIXTURES / "hf" / "nemotron-h", tmp_path / "out", ReshardOptions(to="fsdp_dtensor"))


def test_heads_that_ranks_cannot_share_are_refused(tmp_path):
    """Megatron-LM's `TransformerConfig` refuses such a mesh, whatever the files hold."""
    with pytest.raises(PartitionError, match="4 cannot be divided over tp=8"):
        reshard(FIXTURES / "hf" / "llama", tmp_path / "out", ReshardOptions(to="megatron", mesh=Mesh.of(tp=8)))


def test_a_vocabulary_that_is_said_too_small_is_noticed():
    """What is left behind as padding is not zero then; it may also be padding that was trained, so it is a warning."""
    with open_checkpoint(FIXTURES / "mistral-tp2", SourceOptions(true_vocab=50)) as checkpoint:
        (said,) = [text for text in checkpoint.manifest.warnings if "after the last token are not zero" in text]
    assert "--true-vocab" in said


def test_norms_that_are_kept_less_one_are_read_and_that_is_said(tmp_path):
    """With `--apply-layernorm-1p` the files hold gamma - 1, rounded as they are; transformers' Llama has gamma."""
    shutil.copytree(FIXTURES / "llama-tp2-pp2", tmp_path / "in")
    for path in (tmp_path / "in").rglob(FILE):
        saved = load(path)
        saved["args"].apply_layernorm_1p = True
        for key, tensor in saved["model"].items():
            if key.endswith(("norm.weight", "norm_weight")):
                tensor.sub_(1)
        torch.save(saved, path)
    given = SourceOptions(true_vocab=100)
    with open_checkpoint(tmp_path / "in", given) as checkpoint:
        assert any("are stored as gamma-1 in BF16" in text for text in checkpoint.manifest.warnings)
    reshard(tmp_path / "in", tmp_path / "out", ReshardOptions(to="hf"), source_options=given)
    ours, theirs = (load_file(at / "model.safetensors") for at in (tmp_path / "out", source("llama-tp2-pp2")))
    for name, tensor in theirs.items():
        expected = (tensor - 1) + 1 if name.endswith("norm.weight") else tensor
        assert torch.equal(ours[name], expected), name
    assert verify(tmp_path / "out", VerifyOptions(level="full", against=tmp_path / "in"), source_options=given).ok
