"""`--to hf` of a run's files is what `save_pretrained` of the same model writes, name for name and bit for bit.

Here is one family for each kind of conversion; `docs/benchmarks/hub_names.py` tries every class.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from tiny_models import assert_same, build, config_of, save, stored
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from shardctl.base.errors import UsageError
from shardctl.options import ReshardOptions, SourceOptions, VerifyOptions
from shardctl.report.conversion import list_conversion_facts
from shardctl.report.documents import build_reshard_document
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.digest import digest
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

KINDS = {
    "gpt_neox": "a rename of one class",
    "granitemoe": "renames of experts that stay in one array",
    "mixtral": "experts by themselves, and renames",
    "deepseek_v4": "many renames that depend on their order",
    "qwen2_vl": "a pattern that looks ahead",
    "llava": "models inside, with lists of their own",
    "nemotron_h": "experts without a gate",
    "minimax_m3_vl": "gate and up joined in layers without experts",
    "bailing_hybrid": "an array that holds three",
    "nomic_bert": "queries, keys and values joined again",
    "qwen4_exp_text": "as many arrays as the config says",
    "gpt2": "a tie",
    "t5": "ties of three names",
    "marian": "positions that are not saved",
}


def write_run(folder, name):
    """A model's state in DCP, its config, and what `save_pretrained` writes of it."""
    saved = save(folder / "saved", config_of(name, divisible=False))
    dcp.save({"model": saved.model.state_dict()}, checkpoint_id=folder / "run", no_dist=True)
    (folder / "config.json").write_text((folder / "saved" / "config.json").read_text())
    return SourceOptions(config=folder / "config.json")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", KINDS)
def test_a_run_becomes_what_save_pretrained_writes(tmp_path, name):
    source = write_run(tmp_path, name)
    done = reshard(tmp_path / "run", tmp_path / "out", source_options=source)
    assert_same(stored(tmp_path / "out"), stored(tmp_path / "saved"))
    assert done.record.options["names"] == "hub"
    if name != "marian":  # whose positions are left out
        assert done.record.digest == digest(tmp_path / "saved").digest
    assert verify(tmp_path / "out", VerifyOptions(level="full", against=tmp_path / "run"), source_options=source).ok


INKLING = {
    "vocab_size": 96,
    "unpadded_vocab_size": 90,
    "hidden_size": 32,
    "head_dim": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "layer_types": ["hybrid_sliding", "hybrid"],
    "num_hidden_layers": 2,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "d_rel": 4,
    "rel_extent": 16,
    "n_layers_per_attn_res_block": 1,
    "eos_token_id": 1,
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", ["inkling2_text", "inkling2_loop_text"])
def test_rows_that_a_class_adds_are_written_and_read_again(tmp_path, kind):
    """Inkling 2 has no table: heads are padded, gates and ups alternate, and queries of messages are two arrays."""
    loop = {"loop_layer_index_start": 1, "loop_layer_index_end": 2} if "loop" in kind else {}
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**INKLING, **loop))
    model.save_pretrained(tmp_path / "saved")
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "run", no_dist=True)
    (tmp_path / "run" / "config.json").write_text((tmp_path / "saved" / "config.json").read_text())
    done = reshard(tmp_path / "run", tmp_path / "out", ReshardOptions(to="hf"))
    assert any(each.startswith("padded with zeros to 96 rows") for each in done.warnings)
    assert_same(stored(tmp_path / "out"), stored(tmp_path / "saved"))
    reshard(tmp_path / "out", tmp_path / "ranks", ReshardOptions(mesh=Mesh.of(tp=2)))
    reshard(tmp_path / "ranks", tmp_path / "back", ReshardOptions(to="hf"))
    assert_same(stored(tmp_path / "back"), stored(tmp_path / "saved"))
    for made in ("out", "ranks", "back"):
        assert verify(tmp_path / made, VerifyOptions(level="full", against=tmp_path / "run")).ok


OLDER_PARTS = {
    **{f"{each}_proj.linear.weight": f"{each}_proj.weight" for each in "qkvo"},
    "k_proj.sconv.": "k_sconv.",
    "v_proj.sconv.": "v_sconv.",
    "relative_position_bias.linear.": "r_proj.",
    "relative_position_bias.norm.": "rel_l2_clip.",
    "relative_position_bias.proj": "rel_logits_proj.proj",
    "o_proj.gate_proj.": "gate_proj.",
    "q_proj.norm.": "q_l2_clip.",
}
"""What transformers 5.24 calls parts of Inkling 2's attention, and 5.23 called them; nothing else has another name."""


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_runs_of_both_versions_of_inkling_2_become_the_same(tmp_path):
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["inkling2_text"](**INKLING))
    model.save_pretrained(tmp_path / "saved")
    state, older = model.state_dict(), {}
    for name, tensor in state.items():
        new = next((part for part in OLDER_PARTS if f".self_attn.{part}" in name), "")
        older[name.replace(new, OLDER_PARTS[new]) if new else name] = tensor
    assert len(older) == len(state)
    assert sum(name not in state for name in older) == 24  # as many as the two versions differ in
    for run, tensors in (("5.24", state), ("5.23", older)):
        dcp.save({"model": tensors}, checkpoint_id=tmp_path / run, no_dist=True)
        (tmp_path / run / "config.json").write_text((tmp_path / "saved" / "config.json").read_text())
        reshard(tmp_path / run, tmp_path / f"{run}-hf", ReshardOptions(to="hf"))
        assert_same(stored(tmp_path / f"{run}-hf"), stored(tmp_path / "saved"))
        reshard(tmp_path / run, tmp_path / f"{run}-ranks", ReshardOptions(mesh=Mesh.of(tp=2)))
    assert digest(tmp_path / "5.23-ranks").digest == digest(tmp_path / "5.24-ranks").digest


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    """A Mixtral, as a run and as saved; not to be changed."""
    folder = tmp_path_factory.mktemp("mixtral")
    write_run(folder, "mixtral")
    return folder


def test_the_names_of_the_hub_come_back_from_a_mesh(mixtral, tmp_path):
    """Once they are written, and also from a run whose ranks were written first."""
    source = SourceOptions(config=mixtral / "config.json")
    reshard(mixtral / "run", tmp_path / "ranks", ReshardOptions(mesh=Mesh.of(tp=2)), source_options=source)
    reshard(tmp_path / "ranks", tmp_path / "back", ReshardOptions(to="hf"))
    assert_same(stored(tmp_path / "back"), stored(mixtral / "saved"))
    again = reshard(mixtral / "saved", tmp_path / "again")
    assert "names" not in again.record.options
    assert_same(stored(tmp_path / "again"), stored(mixtral / "saved"))


@pytest.mark.parametrize(
    ("file", "by_default"), [("model.safetensors", False), ("pytorch_model.bin", True), ("run.pt", True)]
)
def test_files_of_the_hub_keep_their_names(mixtral, tmp_path, file, by_default):
    """transformers that has such names in memory writes no pickles; whoever has safetensors of them wanted those."""
    state = build(config_of("mixtral", divisible=False)).state_dict()
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text((mixtral / "config.json").read_text())
    torch.save(state, folder / file) if not file.endswith("safetensors") else save_file(state, folder / file)
    reshard(folder, tmp_path / "out")
    assert_same(stored(tmp_path / "out"), stored(mixtral / "saved") if by_default else state)
    reshard(folder, tmp_path / "asked", ReshardOptions(names="hub"))
    assert_same(stored(tmp_path / "asked"), stored(mixtral / "saved"))
    for names in ("keep", "transformers"):
        reshard(folder, tmp_path / names, ReshardOptions(names=names, to="hf"))
        assert_same(stored(tmp_path / names), state)


def test_the_form_of_the_experts_can_be_another(mixtral, tmp_path):
    source = SourceOptions(config=mixtral / "config.json")
    options = ReshardOptions(to="hf", experts="fused")
    reshard(mixtral / "run", tmp_path / "fused", options, source_options=source)
    names = stored(tmp_path / "fused").keys()
    assert "model.layers.0.mlp.experts.gate_up_proj" in names
    assert "model.layers.0.block_sparse_moe.gate.weight" in names
    assert digest(tmp_path / "fused").digest == digest(mixtral / "saved").digest


def test_only_plain_files_have_names_of_the_hub(mixtral, tmp_path):
    with pytest.raises(UsageError, match="--names hub is for --to hf"):
        reshard(mixtral / "saved", tmp_path / "out", ReshardOptions(names="hub", to="dcp"))


def test_tensors_of_an_array_that_is_not_whole_have_their_own_names(mixtral, tmp_path):
    """Without one of its experts, an array of experts cannot be made of the rest."""
    options = ReshardOptions(to="hf", names="hub", experts="fused", exclude=r"experts\.3\.w2")
    reshard(mixtral / "saved", tmp_path / "out", options)
    names = stored(tmp_path / "out").keys()
    assert "model.layers.0.mlp.experts.gate_up_proj" in names
    assert "model.layers.0.block_sparse_moe.experts.2.w2.weight" in names


def test_the_output_says_whose_names_they_are(mixtral, tmp_path):
    done = reshard(mixtral / "run", tmp_path / "out", source_options=SourceOptions(config=mixtral / "config.json"))
    facts = dict(list_conversion_facts(done, 1.0))
    assert facts["names"] == "as save_pretrained of transformers 5.24 writes them"
    assert build_reshard_document(done, 1.0)["names"] == "hub"
