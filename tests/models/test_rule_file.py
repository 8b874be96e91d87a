"""Rule files say how unknown tensors are cut, and override what a family says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_oracle import fixture, stored

from shardctl.base.errors import UsageError
from shardctl.models import build_rule_table, choose_model, describe_model, load_rules
from shardctl.models.names.naming import bind_manifest
from shardctl.models.tables.name_pattern import LayerPattern, PatternList
from shardctl.tensors.mesh import Mesh
from shardctl.tensors.placement import AxisPartition, PartitionSection, compute_rank_boxes

FOREIGN = {
    "net.embed.weight": (10, 4),
    "net.blocks.0.up.weight": (8, 4),
    "net.blocks.0.scale": (),
    "net.blocks.1.up.weight": (8, 4),
    "net.blocks.10.up.weight": (8, 4),
    "net.norm.weight": (4,),
}
RULES = """
[rules]
"net.blocks.*.up.weight" = [["tp", "fsdp"], ""]
"net.embed.weight" = ["", "tp"]
"**" = ["fsdp"]

[layers]
pattern = "net.blocks.*"
last = ["net.norm.**"]
"""


@pytest.fixture
def load(tmp_path):
    def _load(text):
        path = tmp_path / "rules.toml"
        path.write_text(text)
        return load_rules(path)

    return _load


def test_an_unknown_architecture_is_cut_and_placed_by_its_rules(load):
    model = choose_model({"architectures": ["NetModel"]}, stored(FOREIGN.items()), load(RULES))
    up = model.tensors["net.blocks.10.up.weight"]
    assert model.layers == 3
    assert up.spec.cuts == ((AxisPartition("tp", (PartitionSection(8),)), AxisPartition("fsdp")), ())
    assert up.spec.where == (("layer", 2),)
    assert model.tensors["net.embed.weight"].spec.cuts == ((), (AxisPartition("tp", (PartitionSection(4),)),))
    assert model.tensors["net.embed.weight"].spec.where == (("first", 0),)
    assert model.tensors["net.norm.weight"].spec.where == (("last", 0),)
    assert model.tensors["net.blocks.0.scale"].spec.cuts == ()
    assert model.warnings == ()
    assert model.architecture == "NetModel"


def test_such_a_model_binds_every_tensor_under_its_own_name(load):
    checkpoint = stored(FOREIGN.items())
    bound = bind_manifest(choose_model(None, checkpoint, load(RULES)), checkpoint)
    assert bound.tensors == checkpoint.tensors


def test_tensors_that_no_rule_matches_are_named(load):
    rules = load('[rules]\n"net.blocks.**" = []\n')
    with pytest.raises(UsageError, match=r"matches net\.embed\.weight, net\.norm\.weight") as caught:
        choose_model(None, stored(FOREIGN.items()), rules)
    assert '"**" = []' in caught.value.hint


def test_the_first_rule_that_matches_wins_and_a_useless_one_is_a_warning(load):
    rules = load('[rules]\n"**.weight" = ["tp"]\n"net.norm.weight" = []\n"**" = []\n')
    checkpoint = stored(FOREIGN.items())
    model = choose_model(None, checkpoint, rules)
    assert model.tensors["net.norm.weight"].spec.cuts == ((AxisPartition("tp", (PartitionSection(4),)),),)
    (warning,) = bind_manifest(model, checkpoint).warnings
    assert "'net.norm.weight'" in warning
    assert "matches no tensor" in warning


def test_a_file_overrides_a_known_family_and_leaves_the_rest(load):
    config = fixture("llama")
    plain = describe_model(config)
    checkpoint = stored((t.name, t.shape) for t in plain.own())
    model = choose_model(config, checkpoint, load('[rules]\n"model.layers.*.mlp.up_proj.weight" = ["", "tp"]\n'))
    changed = {n for n in model.tensors if model.tensors[n] != plain.tensors[n]}
    assert changed == {f"model.layers.{n}.mlp.up_proj.weight" for n in range(2)}
    up = model.tensors["model.layers.1.mlp.up_proj.weight"]
    assert up.spec.cuts == ((), (AxisPartition("tp", (PartitionSection(32),)),))
    assert up.spec.where == (("layer", 1),)
    assert bind_manifest(model, checkpoint).tensors == bind_manifest(plain, checkpoint).tensors


def test_a_file_makes_additional_tensors_of_a_known_family_acceptable(load):
    config = fixture("llama")
    extra = {"model.layers.1.adapter.weight": (4, 32), "model.layers.0.adapter.weight": (4, 32)}
    checkpoint = stored(({t.name: t.shape for t in describe_model(config).own()} | extra).items())
    assert bind_manifest(describe_model(config), checkpoint).extra.keys() == extra.keys()
    rules = load('[rules]\n"**.adapter.weight" = ["fsdp"]\n[layers]\npattern = "model.layers.*"\n')
    model = choose_model(config, checkpoint, rules)
    assert set(extra) <= set(bind_manifest(model, checkpoint).tensors)
    assert model.tensors["model.layers.1.adapter.weight"].spec.where == (("layer", 1),)


def test_without_config_and_rules_there_is_no_model():
    assert choose_model(None, stored(FOREIGN.items())) is None


def test_several_layer_patterns_follow_each_other(load):
    rules = load('[rules]\n"**" = []\n[layers]\npattern = ["enc.*", "dec.*"]\n')
    model = choose_model(None, stored([("enc.0.w", (2,)), ("enc.1.w", (2,)), ("dec.0.w", (2,))]), rules)
    assert model.tensors["dec.0.w"].spec.where == (("layer", 2),)
    assert model.layers == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[rules]\n"a" = ["tpp"]', "names 'tpp', which cuts no dim"),
        ('[rules]\n"a" = ["pp"]', "pp places whole layers: see \\[layers\\]"),
        ('[rules]\n"a" = ["dp"]', "dp holds copies"),
        ('[rules]\n"a" = ["tp", "tp"]', "cuts with tp twice"),
        ('[rules]\n"a" = [["fsdp", "tp"]]', "cuts one dim by fsdp then tp"),
        ('[rules]\n"a" = "tp"', "is not a list with one entry a dim"),
        ('[rules]\n"a" = [1]', "is not a pattern or a list of patterns"),
        ('[rules]\n"a.b*" = []', "has the part 'b\\*'"),
        ('[rules]\n"a..b" = []', "has the part ''"),
        ("[rule]\na = []", "unknown key 'rule'"),
        ('[layers]\npatern = "a.*"', "unknown key 'patern'"),
        ('[layers]\npattern = "a.b"', "needs exactly one \\*"),
        ('[layers]\npattern = "a.**"', "needs exactly one \\*"),
        ("rules = 3", "is not a table"),
        ("[rules", "is not TOML"),
    ],
)
def test_what_is_not_understood_is_an_error(load, text, message):
    with pytest.raises(UsageError, match=message):
        load(text)


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(UsageError, match=r"cannot read the rule file .*none\.toml"):
        load_rules(tmp_path / "none.toml")


def test_a_rule_of_more_dims_than_the_tensor_is_an_error(load):
    with pytest.raises(UsageError, match=r"is for 3 dims, but net\.embed\.weight is \[10, 4\]"):
        choose_model(None, stored(FOREIGN.items()), load('[rules]\n"**" = ["", "", "tp"]'))


def test_the_cuts_of_a_rule_place_as_those_of_a_family_do(load):
    model = choose_model(None, stored(FOREIGN.items()), load(RULES))
    mesh = Mesh.of(tp=2, fsdp=2)
    tensor = model.tensors["net.blocks.0.up.weight"]
    origins = [compute_rank_boxes(tensor.shape, tensor.spec, mesh, mesh.coordinate(r))[0].origin[0] for r in range(4)]
    assert origins == [0, 4, 2, 6]


parts = st.sampled_from(["a", "b", "ab", "0"])
names = st.lists(parts, min_size=1, max_size=5).map(tuple)
patterns = st.lists(st.one_of(parts, st.sampled_from(["*", "**"])), min_size=1, max_size=5).map(tuple)


def matches(pattern, name):
    """The definition, word by word."""
    if not pattern:
        return not name
    if pattern[0] == "**":
        return any(matches(pattern[1:], name[n:]) for n in range(len(name) + 1))
    return bool(name) and pattern[0] in ("*", name[0]) and matches(pattern[1:], name[1:])


@given(st.lists(patterns, max_size=4), names)
def test_patterns_match_whole_parts_and_the_first_wins(some, name):
    expected = next((n for n, pattern in enumerate(some) if matches(pattern, name)), None)
    assert PatternList([".".join(p) for p in some]).first(".".join(name)) == expected


def test_a_layer_pattern_counts_only_whole_parts():
    pattern = LayerPattern("model.layers.*")
    assert [pattern.number(n) for n in ("model.layers.3", "model.layers.3.w", "model.layers.3x.w", "layers.3.w")] == [
        3,
        3,
        None,
        None,
    ]


def test_the_rule_table_shows_every_rule_with_what_it_governs(load):
    config = fixture("qwen2-tied")
    rows = {row.pattern: row for row in build_rule_table(describe_model(config))}
    assert sum(row.tensors for row in rows.values()) == sum(1 for _ in describe_model(config).own())
    q = rows["model.layers.*.self_attn.q_proj.weight"]
    assert (q.dims, q.axes, q.stages, q.tensors) == ("q hidden", (("tp", "fsdp"), ()), ("layer",), 2)
    assert rows["model.embed_tokens.weight"].stages == ("first", "last")
    checkpoint = stored((t.name, t.shape) for t in describe_model(config).own())
    changed = choose_model(config, checkpoint, load('[rules]\n"**.q_proj.weight" = ["", "tp"]\n'))
    row = next(row for row in build_rule_table(changed) if row.pattern == "**.q_proj.weight")
    assert (row.dims, row.axes, row.tensors) == ("q hidden", ((), ("tp",)), 2)


def test_the_patterns_of_a_familys_table_can_be_written_into_a_rule_file():
    model = describe_model(fixture("gpt2"))
    order = PatternList([row.pattern for row in build_rule_table(model)])
    assert all(order.first(tensor.name) is not None for tensor in model.own())
