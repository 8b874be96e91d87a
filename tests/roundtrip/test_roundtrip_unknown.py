"""Architectures that neither a table nor transformers knows: what fsdp, pp and other layouts make of them, and back."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import assert_same, stored
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from shardctl.base.errors import SourceError, UnsupportedError, UsageError
from shardctl.checkpoint.opening import open_checkpoint
from shardctl.cli.program import run
from shardctl.options import PlanOptions, ReshardOptions, SourceOptions, VerifyOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.digest import digest
from shardctl.verbs.inspect import inspect
from shardctl.verbs.plan import plan
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

HIDDEN, TOKENS, LAYERS = 12, 21, 11


class DecoderLayer(torch.nn.Module):
    """Attention and an MLP under names that nobody else uses."""

    def __init__(self) -> None:
        super().__init__()
        self.ask, self.key, self.tell = (torch.nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(3))
        self.widen, self.narrow = torch.nn.Linear(HIDDEN, 30), torch.nn.Linear(30, HIDDEN)
        self.calm = torch.nn.LayerNorm(HIDDEN)


class ExpertLayer(torch.nn.Module):
    """A fused qkv, and experts of which each has tensors of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(HIDDEN, 20), torch.nn.Linear(HIDDEN, HIDDEN)
        self.router = torch.nn.Linear(HIDDEN, 3, bias=False)
        self.experts = torch.nn.ModuleList(
            torch.nn.ModuleDict({"up": torch.nn.Linear(HIDDEN, 7), "down": torch.nn.Linear(7, HIDDEN)})
            for _ in range(3)
        )


class UnknownModel(torch.nn.Module):
    """An embedding, layers, a norm and a head, and a scale without dims."""

    def __init__(self, layer: type[torch.nn.Module], *, tied: bool = False) -> None:
        super().__init__()
        self.tok_embed = torch.nn.Embedding(TOKENS, HIDDEN)
        self.stack = torch.nn.ModuleList(layer() for _ in range(LAYERS))
        self.last_norm = torch.nn.LayerNorm(HIDDEN)
        self.to_logits = torch.nn.Linear(HIDDEN, TOKENS, bias=False)
        self.scale = torch.nn.Parameter(torch.tensor(0.5))
        self.register_buffer("seen", torch.arange(5))
        if tied:
            self.to_logits.weight = self.tok_embed.weight


CONFIG = {"architectures": ["UnknownForCausalLM"], "model_type": "unknown-2026", "vocab_size": TOKENS}
KINDS = {"decoder": DecoderLayer, "experts": ExpertLayer}


@pytest.fixture(scope="module", params=[("decoder", True), ("experts", False)], ids=str)
def unknown(request, tmp_path_factory):
    """A checkpoint of each, the one with a config, the other without."""
    kind, config = request.param
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp(kind) / "source"
    path.mkdir()
    save_file(UnknownModel(KINDS[kind]).state_dict(), path / "model.safetensors", {"format": "pt"})
    if config:
        (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def read_ranks(folder, world):
    """What each rank has, by name."""
    found = []
    for rank in range(world):
        (path,) = folder.glob(f"shard-{rank + 1:05d}-*.safetensors")
        found.append(load_file(path))
    return found


@pytest.mark.parametrize("degree", [2, 5])
def test_fsdp_cuts_dim_0_as_torch_chunk_does(unknown, tmp_path, degree):
    done = reshard(unknown, tmp_path / "ranks", ReshardOptions(mesh=Mesh.of(fsdp=degree)))
    title = "UnknownForCausalLM" if (unknown / "config.json").exists() else "a model without config.json"
    assert done.warnings == (f"no table for {title}: tensors are cut along dim 0",)
    ranks = read_ranks(tmp_path / "ranks", degree)
    for name, tensor in stored(unknown).items():
        parts = tensor.chunk(degree) if tensor.dim() else (tensor,) * degree
        for held, part in zip(ranks, parts, strict=False):
            assert torch.equal(held[name], part), name
        assert all(name not in held for held in ranks[len(parts) :])


@pytest.mark.parametrize(
    ("mesh", "to"),
    [
        (Mesh.of(fsdp=3), "ranks"),
        (Mesh.of(pp=3), "ranks"),
        (Mesh.of(dp=2, cp=2), "ranks"),
        (Mesh.of(pp=2, fsdp=2, dp=2), "ranks"),
        (Mesh.of(pp=2, fsdp=2), "dcp"),
        (Mesh.of(), "dcp"),
        (Mesh.of(), "universal"),
        (Mesh.of(), "hf"),
    ],
    ids=str,
)
def test_there_and_back_is_the_identity(unknown, tmp_path, mesh, to):
    reshard(unknown, tmp_path / "there", ReshardOptions(mesh=mesh, to=to))
    assert verify(tmp_path / "there", VerifyOptions(level="load", against=unknown)).ok
    reshard(tmp_path / "there", tmp_path / "back", ReshardOptions(to="hf"))
    assert_same(stored(tmp_path / "back"), stored(unknown))
    assert digest(tmp_path / "there").digest == digest(unknown).digest == digest(tmp_path / "back").digest


def test_ranks_are_cut_again_for_another_mesh(unknown, tmp_path):
    reshard(unknown, tmp_path / "one", ReshardOptions(mesh=Mesh.of(pp=2, fsdp=2)))
    reshard(tmp_path / "one", tmp_path / "other", ReshardOptions(mesh=Mesh.of(fsdp=3)))
    reshard(unknown, tmp_path / "direct", ReshardOptions(mesh=Mesh.of(fsdp=3)))
    for path in sorted(tmp_path.glob("direct/*.safetensors")):
        assert path.read_bytes() == (tmp_path / "other" / path.name).read_bytes()


def test_torch_loads_what_dcp_holds_of_it(unknown, tmp_path):
    reshard(unknown, tmp_path / "dcp", ReshardOptions(mesh=Mesh.of(pp=2, fsdp=2), to="dcp"))
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "all.pt")
    assert_same(torch.load(tmp_path / "all.pt")["model"], stored(unknown))


class TestPipelineStages:
    def test_names_number_the_layers_and_what_precedes_and_follows_is_on_the_outer_stages(self, unknown, tmp_path):
        done = reshard(unknown, tmp_path / "ranks", ReshardOptions(mesh=Mesh.of(pp=2), stages="6,5"))
        first, last = (set(held) for held in read_ranks(tmp_path / "ranks", 2))
        assert {name.split(".")[1] for name in first if name.startswith("stack.")} == set("012345")
        assert {name.split(".")[1] for name in last if name.startswith("stack.")} == {"6", "7", "8", "9", "10"}
        assert {name for name in first if "stack" not in name} == {"tok_embed.weight", "scale", "seen"}
        assert {name for name in last if "stack" not in name} == {
            "last_norm.weight",
            "last_norm.bias",
            "to_logits.weight",
        }
        assert "layers are counted by names: 11 of stack.*" in done.warnings[0]
        assert done.warnings[1:] == ("assumed to precede the layers, because names do not say: seen, scale",)

    def test_the_plan_says_it_in_text_and_in_json(self, unknown, capfd):
        assert run(["plan", str(unknown), "--pp", "2", "--json"]) == 0
        captured = capfd.readouterr()
        assert "layers are counted by names: 11 of stack.*" in json.loads(captured.out)["warnings"][0]
        assert run(["plan", str(unknown), "--pp", "2"]) == 0
        assert "layers are counted by names: 11 of stack.*" in capfd.readouterr().err

    def test_more_stages_than_layers_are_refused(self, unknown, tmp_path):
        with pytest.raises(UsageError, match="pp=12 needs at least 12 layers, but the model has 11"):
            reshard(unknown, tmp_path / "ranks", ReshardOptions(mesh=Mesh.of(pp=12)))

    def test_a_model_whose_names_number_nothing_has_no_stages(self, tmp_path):
        (tmp_path / "flat").mkdir()
        save_file({"up": torch.ones(2, 2), "down": torch.ones(2, 2)}, tmp_path / "flat" / "model.safetensors")
        with pytest.raises(UsageError, match="pp=2 needs at least 2 layers, but the model has 0"):
            reshard(tmp_path / "flat", tmp_path / "ranks", ReshardOptions(mesh=Mesh.of(pp=2)))


@pytest.mark.parametrize("mesh", [Mesh.of(tp=2), Mesh.of(fsdp=2, ep=2)], ids=str)
def test_what_needs_a_table_is_refused_with_what_does_not(unknown, tmp_path, mesh):
    given = SourceOptions(rules_from="none")
    with pytest.raises((UnsupportedError, SourceError), match=f"a mesh of {mesh} needs to know how to cut") as refused:
        reshard(unknown, tmp_path / "ranks", ReshardOptions(mesh=mesh), source_options=given)
    assert "--rules FILE" in (refused.value.hint or "")
    assert "fsdp, pp, dp and cp need none" in (refused.value.hint or "")


def test_a_search_compares_only_meshes_that_need_no_table(unknown):
    found = plan(unknown, ReshardOptions(), plan_options=PlanOptions(search=True, devices=4)).explored
    assert found is not None
    assert found.found.ranked
    assert all(one.mesh.degree("tp") == one.mesh.ep == 1 for one in found.found.ranked)


class TestTies:
    def test_two_names_of_one_storage_are_one_tensor_on_both_stages(self, tmp_path):
        torch.manual_seed(0)
        model = UnknownModel(DecoderLayer, tied=True)
        state = dict(reversed(model.state_dict().items()))  # the head first
        (tmp_path / "source").mkdir()
        torch.save(state, tmp_path / "source" / "pytorch_model.bin")
        reshard(tmp_path / "source", tmp_path / "ranks", ReshardOptions(mesh=Mesh.of(pp=2)))
        first, last = read_ranks(tmp_path / "ranks", 2)
        assert "tok_embed.weight" in first
        assert "to_logits.weight" not in first
        assert "to_logits.weight" in last
        assert "tok_embed.weight" not in last
        assert digest(tmp_path / "ranks").digest == digest(tmp_path / "source").digest
        reshard(tmp_path / "ranks", tmp_path / "back", ReshardOptions(to="hf"))
        assert_same(stored(tmp_path / "back"), model.state_dict())

    @pytest.mark.parametrize("tied", [True, False, None])
    def test_an_embedding_that_the_config_ties_is_on_the_last_stage_too(self, tmp_path, tied):
        (tmp_path / "source").mkdir()
        state = UnknownModel(DecoderLayer).state_dict()
        del state["to_logits.weight"]
        save_file(state, tmp_path / "source" / "model.safetensors", {"format": "pt"})
        inner = {"vision_config": {"tie_word_embeddings": not tied}}  # which the outer word overrules
        said = {} if tied is None else {"tie_word_embeddings": tied, **inner}
        (tmp_path / "source" / "config.json").write_text(json.dumps(CONFIG | said))
        done = reshard(tmp_path / "source", tmp_path / "ranks", ReshardOptions(mesh=Mesh.of(pp=2)))
        _, last = read_ranks(tmp_path / "ranks", 2)
        assert ("tok_embed.weight" in last) == (tied is not False)
        line = "held by every stage that computes with it: tok_embed.weight"
        assert (line in done.warnings) == (tied is not False)
        assert verify(tmp_path / "ranks", VerifyOptions(level="full", against=tmp_path / "source")).ok

    def test_one_that_is_stored_beside_a_head_is_not(self, tmp_path):
        (tmp_path / "source").mkdir()
        save_file(UnknownModel(DecoderLayer).state_dict(), tmp_path / "source" / "model.safetensors", {"format": "pt"})
        (tmp_path / "source" / "config.json").write_text(json.dumps(CONFIG | {"tie_word_embeddings": True}))
        reshard(tmp_path / "source", tmp_path / "ranks", ReshardOptions(mesh=Mesh.of(pp=2)))
        _, last = read_ranks(tmp_path / "ranks", 2)
        assert "tok_embed.weight" not in last


def test_a_known_family_that_lacks_a_tensor_and_has_another_is_refused_as_before(tiny, tmp_path):
    source = tiny("llama")
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_bytes((source.path / "config.json").read_bytes())
    tensors = {name: tensor for name, tensor in stored(source.path).items() if name != "model.norm.weight"}
    save_file(tensors | {"v_head.weight": torch.ones(3, 3)}, tmp_path / "source" / "model.safetensors")
    with pytest.raises(UnsupportedError, match=r"LlamaForCausalLM has no tensor v_head\.weight"):
        reshard(tmp_path / "source", tmp_path / "ranks", ReshardOptions(mesh=Mesh.of(fsdp=2)))


def test_inspect_shows_how_the_axes_that_need_no_table_cut(unknown):
    rules = {rule.pattern: rule for rule in inspect(unknown).rules}
    assert rules["tok_embed.weight"].axes == (("fsdp",), ())
    assert rules["tok_embed.weight"].stages == ("first",)
    assert rules["to_logits.weight"].stages == ("last",)
    assert sum(rule.tensors for rule in rules.values()) == len(stored(unknown))


def test_tensors_that_are_cut_alike_share_their_cuts(unknown):
    with open_checkpoint(unknown) as checkpoint:
        placed = checkpoint.require_placement(Mesh.of(fsdp=2)).tensors.values()
    assert len({id(tensor.spec.cuts) for tensor in placed}) == len({len(tensor.shape) for tensor in placed})


def test_a_rule_file_without_layers_leaves_counting_them_to_names(unknown, tmp_path):
    (tmp_path / "rules.toml").write_text('[rules]\n"tok_embed.weight" = ["", "tp"]\n"**" = ["fsdp"]\n')
    reading = SourceOptions(rules=tmp_path / "rules.toml")
    both = ReshardOptions(mesh=Mesh.of(tp=2, pp=2))
    done = reshard(unknown, tmp_path / "ranks", both, source_options=reading)
    assert done.warnings == ("layers are counted by names, because no rule says where they are: 11 of stack.*",)
    last = read_ranks(tmp_path / "ranks", 4)[3]
    assert "to_logits.weight" in last
    assert "tok_embed.weight" not in last
    assert not reshard(unknown, tmp_path / "tp", ReshardOptions(mesh=Mesh.of(tp=2)), source_options=reading).warnings
