"""What the shards compute is what the source computes: every family, over tp, pp, fsdp, ep and their products."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import transformers
from forward_models import FIXTURES, REPLICATE, config_of, cut, run, save
from safetensors.torch import load_file, save_file

from shardctl.checkpoint.opening import open_checkpoint
from shardctl.running.forward import CandidateCheckpoint, ForwardOptions, OriginalCheckpoint
from shardctl.running.forward.comparison import ForwardComparison
from shardctl.tensors.mesh import Mesh

THOROUGH = ("llama", "gpt2", "gemma", "mixtral", "phi3", "gpt_neox", "qwen2-tied", "qwen3", "bert", "t5")
EXPERTS = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "llama4_text", "jamba-moe")
BROKEN = {"llama4"}
"""Its wrapper in transformers 5.24 reads `image_outputs` of an output that has none; `llama4_text` runs."""
PROJECTOR = (
    "llava",
    "gemma3",
    "gemma4",
    "llama4",
    "minimax_m3_vl",
    "mllama",
    "paligemma",
    "mistral3",
    "deberta",
    "voxtral",
)
"""What joins images or sounds to text, which is reached by neither alone; of Gemma 4 what sees and hears, too; of
DeBERTa an embedding that is read and never called."""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Gives a fixture's model, saved once, or its shards on a mesh."""
    base = tmp_path_factory.mktemp("forward")

    def give(name, mesh="", **changes):
        whole = base / name
        if not whole.exists():
            save(whole, config_of(name, **changes))
        if not mesh:
            return whole
        shards = base / f"{name}-{mesh}"
        return shards if shards.exists() else cut(whole, shards, Mesh.parse(mesh))

    return give


def list_meshes(name):
    """The meshes over which a model is run."""
    yield "pp=2,fsdp=2,tp=2"
    yield from ("tp=2", "tp=4", "fsdp=2", "pp=2", "fsdp=2,tp=2") if name in THOROUGH else ()
    yield from ("dp=2,tp=2",) if name in {"llama", "mixtral"} else ()
    yield from ("fsdp=2,ep=2", "tp=4,ep=2,etp=2") if name in EXPERTS else ()


@pytest.mark.parametrize("name", [name for name in FIXTURES if name not in BROKEN])
def test_shards_compute_what_the_source_computes(made, name, subtests):
    for mesh in list_meshes(name):
        with subtests.test(mesh=mesh):
            check_forward_pass(made, name, mesh)


def check_forward_pass(made, name, mesh):
    result = run(made(name), made(name, mesh))
    assert result.status == "passed", result.findings
    assert not result.findings
    parts = "tp=" in mesh or "ep=" in mesh
    assert result.worst.error <= (1e-5 if parts else 0)
    assert result.output_error <= (1e-4 if parts else 0)
    assert (result.share is not None) == parts
    if "tp=" in mesh:  # the two experts of a token are added in one order or the other, to the same bits
        assert result.worst.error > 0, "no rank computed with a part of its own"
    assert len(result.blocks) > 3
    left = [note for note in result.notes if "not reached" in note]
    assert not left or name.startswith(PROJECTOR), left


def comparison(source, shards, **options):
    """The parts of a comparison, for a look at what is in between."""
    with open_checkpoint(source, REPLICATE) as whole, open_checkpoint(shards, REPLICATE) as parts:
        original = OriginalCheckpoint(
            whole.stored, whole.manifest, whole.source, whole.config, whole.model, whole.source.root
        )
        candidate = CandidateCheckpoint(
            parts.manifest, parts.source, parts.model, parts.record.mesh, parts.record.stages
        )
        check = ForwardComparison(candidate, original, ForwardOptions(**options))
        executor = check.executor(getattr(transformers, whole.config["architectures"][0]), "fp32")
        yield check, executor, *check.sides.fill(executor)


@pytest.mark.parametrize(
    "name", ["llama", "gpt2", "qwen2-tied", "gemma", "mixtral", "gpt_neox", "t5", "bert", "deepseek_v3"]
)
def test_the_source_in_parts_is_bit_for_bit_the_model_that_transformers_loads(made, name):
    """The reference itself: whatever else is compared with it would mean nothing."""
    from shardctl.running.forward.inputs import build_inputs

    kind = getattr(transformers, config_of(name)["architectures"][0])
    plain = {"attn_implementation": "eager"} | ({"experts_implementation": "eager"} if name in EXPERTS else {})
    whole = kind.from_pretrained(made(name), **plain).eval()
    for _, executor, source, _ in comparison(made(name), made(name, "tp=2")):
        inputs = build_inputs(executor.skeleton.model, "cpu")
        with torch.no_grad():
            expected = whole(**inputs, use_cache=False) if name != "bert" else whole(**inputs)
        assert torch.equal(executor.run(inputs, source).logits, expected.logits)
        assert inputs["input_ids"].shape[0] == 2
        assert all(
            slot.empty is getattr(slot.module, slot.attribute) for u in executor.skeleton.units for slot in u.slots
        )


@pytest.fixture(scope="module")
def sentences(minilm, tmp_path_factory):
    source = tmp_path_factory.mktemp("minilm") / "source"
    shutil.copytree(minilm, source, ignore=shutil.ignore_patterns("__pycache__"))
    return source


@pytest.mark.parametrize("mesh", ["tp=2", "pp=2,tp=2", "fsdp=2,pp=2"])
def test_the_hidden_states_of_a_trained_model_are_the_same(sentences, tmp_path, mesh):
    """MiniLM has no head: what is compared is what sentence embeddings are the mean of."""
    result = run(sentences, cut(sentences, tmp_path / "ranks", Mesh.parse(mesh)))
    assert (result.status, result.output, len(result.blocks)) == ("passed", "last_hidden_state", 8)
    assert result.worst.error <= (1e-5 if "tp" in mesh else 0)
    assert (result.output_error > 0) == ("tp" in mesh)


def test_what_comes_back_in_one_piece_is_bit_for_bit_the_same(made, tmp_path):
    from shardctl.options import ReshardOptions
    from shardctl.verbs.reshard import reshard

    reshard(made("llama", "pp=2,fsdp=2,tp=2"), tmp_path / "back", ReshardOptions(to="hf"))
    result = run(made("llama"), tmp_path / "back")
    assert (result.status, result.output_error, result.engine) == ("passed", 0.0, "one process, whole tensors")


def test_the_source_may_be_cut_itself(made):
    result = run(made("llama", "fsdp=2"), made("llama", "tp=2"))
    assert result.status == "passed"
    assert 0 < result.worst.error < 1e-5


def test_a_cast_that_was_asked_for_is_no_error_and_is_said(made, tmp_path):
    shards = cut(made("llama"), tmp_path / "ranks", Mesh.of(tp=2), dtype="bf16")
    result = run(made("llama"), shards)
    assert result.status == "passed"
    assert result.worst.error <= 1e-5
    assert "the source is rounded to BF16, as the shards are" in result.notes


def test_bf16_says_nothing_of_experts(made):
    result = run(made("mixtral"), made("mixtral", "tp=2"), dtype="bf16")
    assert result.status == "skipped"
    assert "routers choose other experts" in result.reason


def test_the_result_says_what_ran(made):
    result = run(made("llama"), made("llama", "pp=2,fsdp=2,tp=2"))
    assert result.engine == "8 virtual ranks in one process (pp2 x fsdp2 x tp2)"
    assert result.architecture == "LlamaForCausalLM"
    assert result.versions == {"torch": torch.__version__, "transformers": transformers.__version__}
    assert (result.output, result.positions, result.flips) == ("logits", 64, 0)
    assert result.tolerance.block == 1e-5
    assert result.read_bytes > 3 * (made("llama") / "model.safetensors").stat().st_size * 0.9
    layers = config_of("llama")["num_hidden_layers"]
    names = ["model.embed_tokens", *(f"model.layers.{n}" for n in range(layers)), "model.norm", "lm_head"]
    assert [block.name for block in result.blocks] == names


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma", "mixtral", "gpt_oss", "llama4_text", "bert"])
@pytest.mark.parametrize("mesh", ["tp=2", "fsdp=2"])
def test_weights_too_large_to_hold_are_read_in_stretches_and_experts_one_by_one(made, name, mesh):
    """The limit is that of a real model in the small: rows of matrices, rows of tables, single experts."""
    result = run(made(name), made(name, mesh), limit=600)
    assert result.status == "passed", (result.findings, result.notes)
    assert result.worst.error <= (1e-5 if mesh == "tp=2" else 0)
    joined = [note for note in result.notes if "joined by shardctl" in note]
    assert bool(joined) == (name == "mixtral")
    whole = [note for note in result.notes if "read whole" in note]
    assert bool(whole) == (name == "llama4_text"), "only Llama 4 multiplies with all experts at once"


def test_parameters_that_no_file_has_are_those_of_a_new_model_and_that_is_said(made, tmp_path):
    whole = tmp_path / "source"
    shutil.copytree(made("bert"), whole)
    weights = load_file(whole / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if "pooler" not in name and "cls." not in name}
    save_file(kept, whole / "model.safetensors", {"format": "pt"})
    config = json.loads((whole / "config.json").read_text())
    (whole / "config.json").write_text(json.dumps({**config, "architectures": ["BertModel"]}))
    result = run(whole, cut(whole, tmp_path / "ranks", Mesh.of(tp=2)))
    assert result.status == "passed", result.findings
    said = "2 parameters are in no file and have the values of a new model: pooler.dense.weight, pooler.dense.bias"
    assert said in result.notes
