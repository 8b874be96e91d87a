"""Derived tables are equal to those written by hand wherever they cut, and print as rule files that say the same."""

from __future__ import annotations

import pytest
from model_oracle import FIXTURES, fixture, stored

from shardctl.models import describe_model, load_rules
from shardctl.models.derived import derive_model, format_rule_file
from shardctl.models.derived.derivation import ORDER_UNKNOWN
from shardctl.models.derived.library_names import build_renamer
from shardctl.models.rules.untabled import build_untabled_model

LAYER = "model.layers.0"


def derive(config, shapes, **how):
    return derive_model(config, build_untabled_model(config, stored(shapes)).model, share_kv=True, **how)


def list_cuts(tensor):
    """What tp and the axes of experts do with a tensor."""
    dims = [
        [(c.axis, [(s.size, s.unit) for s in c.sections]) for c in dim if "fsdp" not in c.axis]
        for dim in tensor.spec.cuts
    ]
    return dims, tensor.spec.member


def is_cut(tensor):
    dims, member = list_cuts(tensor)
    return any(dims) or member is not None


TOWERS = ("ada_rms_norm", "audio_tower", "vision", "visual", "projector", "head.mlp", "merger")
"""What tables leave whole on purpose: towers are small, and so is what makes a scale of a delay."""


@pytest.mark.parametrize("name", FIXTURES)
def test_what_is_cut_is_cut_as_in_the_table_written_by_hand(name, subtests):
    config = fixture(name)
    table = describe_model(config, kv_heads="replicate")
    for library in (True, False):
        with subtests.test(library=library):
            check_derived_cuts(name, config, table, library=library)


def check_derived_cuts(name, config, table, *, library):
    derived = derive(config, [(t.name, t.shape) for t in table.own()], library=library)
    assert derived.derivation.rules
    uncut = {each.pattern for each in derived.derivation.uncut}
    for each, tensor in derived.tensors.items():
        if not is_cut(tensor) or any(word in each for word in TOWERS):
            continue
        mine, theirs = list_cuts(tensor), list_cuts(table.tensors[each])
        if mine == theirs or (name == "longcat_flash" and "experts" in each and mine[0] == theirs[0]):
            continue  # the table counts LongCat's idle experts apart
        assert "experts" in each, (each, mine, theirs)
        assert [dim for dim in mine[0] if dim] == [theirs[0][0]], each  # by whole experts alone, and said to be so
        assert any(
            rule.pattern.endswith(each.rpartition(".")[2]) and "not known" in rule.rule.note
            for rule in derived.derivation.rules
        )
    assert not any(is_cut(derived.tensors[n]) for n in derived.tensors if n in uncut)


def test_a_rule_file_says_the_same(tmp_path):
    config = fixture("qwen3_moe")
    table = describe_model(config)
    shapes = [(t.name, t.shape) for t in table.own()]
    derived = derive(config, shapes)
    path = tmp_path / "rules.toml"
    path.write_text(format_rule_file(derived.derivation))
    read = load_rules(path).model(stored(shapes))
    assert not read.warnings
    for name, tensor in derived.tensors.items():
        assert list_cuts(read.tensors[name]) == list_cuts(tensor), name
        assert [[c.axis for c in dim] for dim in read.tensors[name].spec.cuts] == [
            [c.axis for c in dim] for dim in tensor.spec.cuts
        ]
        assert read.tensors[name].spec.where == tensor.spec.where, name
    said = path.read_text()
    assert '"model.layers.*.self_attn.k_proj.weight" = [["tp of 2x16 shared", "fsdp"]]  # keys by heads' in said
    assert "# from Qwen3MoeConfig of transformers 5" in said


ATTENTION = {
    f"{LAYER}.self_attn.q_proj.weight": (32, 32),
    f"{LAYER}.self_attn.k_proj.weight": (16, 32),
    f"{LAYER}.self_attn.v_proj.weight": (16, 32),
    f"{LAYER}.self_attn.o_proj.weight": (32, 32),
}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32, "architectures": ["NobodyForCausalLM"]}


def find_cut(shapes, config=HEADS):
    """The last words of what is cut, and why the rest is not."""
    derived = derive(config, shapes.items(), library=False)
    cut = {name.removesuffix(".weight").rpartition(".")[2] for name, t in derived.tensors.items() if is_cut(t)}
    return cut, {
        each.pattern.removesuffix(".weight").rpartition(".")[2]: each.reason for each in derived.derivation.uncut
    }


class TestPairs:
    def test_all_four(self):
        assert find_cut(ATTENTION) == ({"q_proj", "k_proj", "v_proj", "o_proj"}, {})

    @pytest.mark.parametrize("missing", ATTENTION)
    def test_a_part_that_is_not_there_leaves_the_others_whole(self, missing):
        cut, uncut = find_cut({name: shape for name, shape in ATTENTION.items() if name != missing})
        assert not cut
        assert set(uncut.values()) == {"not recognised"}

    def test_heads_that_do_not_fit(self):
        cut, uncut = find_cut(ATTENTION, {**HEADS, "num_attention_heads": 5})
        assert not cut
        assert uncut["q_proj"] == "no number of heads in the config fits [32, 32] and [16, 32]"

    @pytest.mark.parametrize(("rows", "sections"), [(48, [(24, 1), (24, 1)]), (24, [(24, 1)]), (36, None)])
    def test_moshis_linears_one_deeper_and_gate_above_up(self, rows, sections):
        """Moshi calls linears `q_proj.linear`, and `fc1` is a gate and an up where it has twice the rows of `fc2`."""
        shapes = {name.replace(".weight", ".linear.weight"): shape for name, shape in ATTENTION.items()}
        shapes |= {f"{LAYER}.mlp.fc1.weight": (rows, 32), f"{LAYER}.mlp.fc2.weight": (32, 24)}
        config = {**HEADS, "architectures": ["MoshiForCausalLM"]}
        tensors = derive(config, shapes.items(), library=False).tensors
        assert list_cuts(tensors[f"{LAYER}.self_attn.k_proj.linear.weight"])[0] == [[("tp", [(16, 8)])], []]
        wanted = [[("tp", sections)], []] if sections else [[], []]
        assert list_cuts(tensors[f"{LAYER}.mlp.fc1.weight"])[0] == wanted

    @pytest.mark.parametrize(
        ("extra", "shape"),
        [("pos_bias_w", (4, 8)), ("linear_new.weight", (32, 32)), ("inner_norm.weight", (16,)), ("lambda_q1", (8,))],
    )
    def test_something_beside_them_that_may_speak_of_heads(self, extra, shape):
        cut, uncut = find_cut({**ATTENTION, f"{LAYER}.self_attn.{extra}": shape})
        assert not cut
        assert uncut["q_proj"].startswith(f"what {extra.removesuffix('.weight')} ")

    def test_pooling_by_multihead_attention_is_whole(self):
        shapes = {"head.attention.in_proj_weight": (96, 32), "head.attention.in_proj_bias": (96,)}
        output = {"head.attention.out_proj.weight": (32, 32), "head.attention.out_proj.bias": (32,)}
        cut, uncut = find_cut({**shapes, **output}, {**HEADS, "num_key_value_heads": 4})
        assert not cut
        assert uncut["in_proj_weight"].startswith("nn.MultiheadAttention")

    def test_columns_that_do_not_fit(self):
        shapes = {f"{LAYER}.mlp.gate_proj.weight": (48, 32), f"{LAYER}.mlp.up_proj.weight": (40, 32)}
        cut, uncut = find_cut({**shapes, f"{LAYER}.mlp.down_proj.weight": (32, 48)})
        assert not cut
        assert uncut["up_proj"] == "the shapes of its linears do not fit each other"

    def test_the_bias_of_a_sum_is_whole(self):
        shapes = {**ATTENTION, f"{LAYER}.self_attn.o_proj.bias": (32,), f"{LAYER}.self_attn.q_proj.bias": (32,)}
        tensors = derive(HEADS, shapes.items(), library=False).tensors
        assert not is_cut(tensors[f"{LAYER}.self_attn.o_proj.bias"])
        assert is_cut(tensors[f"{LAYER}.self_attn.q_proj.bias"])

    @pytest.mark.parametrize(
        ("name", "architecture", "cut"),
        [
            ("query_key_value", "Glm4MoeForCausalLM", set()),
            ("qkv_proj", "NobodyForCausalLM", set()),
            ("qkv_proj", "Phi3ForCausalLM", {"qkv_proj", "o_proj"}),
        ],
    )
    def test_a_fused_array_whose_order_is_not_known_is_whole(self, name, architecture, cut):
        shapes = {f"{LAYER}.self_attn.{name}.weight": (64, 32), f"{LAYER}.self_attn.o_proj.weight": (32, 32)}
        found, uncut = find_cut(shapes, {**HEADS, "architectures": [architecture]})
        assert found == cut
        assert uncut.get(name, ORDER_UNKNOWN) == ORDER_UNKNOWN

    def test_gate_and_up_of_a_class_that_nobody_knows_are_whole(self):
        shapes = {f"{LAYER}.mlp.gate_up_proj.weight": (48, 32), f"{LAYER}.mlp.down_proj.weight": (32, 24)}
        assert find_cut(shapes) == (set(), dict.fromkeys(("gate_up_proj", "down_proj"), ORDER_UNKNOWN))
        derivation = derive(HEADS, shapes.items(), library=False).derivation
        assert derivation.unordered == tuple(n.replace(".0.", ".*.") for n in shapes)
        assert "whole, because the order of what is fused in them is not known: model.layers.*" in derivation.describe()
        assert find_cut(shapes, {**HEADS, "architectures": ["Phi3ForCausalLM"]})[0] == {"gate_up_proj", "down_proj"}

    def test_stacks_of_gates_and_ups_of_a_class_that_nobody_knows_are_cut_by_experts_alone(self):
        shapes = {f"{LAYER}.mlp.experts.gate_up_proj": (4, 48, 32), f"{LAYER}.mlp.experts.down_proj": (4, 32, 24)}
        derived = derive(HEADS, shapes.items(), library=False)
        assert {str(list_cuts(t)[0]) for t in derived.tensors.values()} == {str([[("ep", [(4, 1)])], [], []])}
        assert len(derived.derivation.unordered) == 2


def test_sarvams_fused_rows_are_queries_then_keys_then_values():
    """Its `query_key_value` is split by transformers when it is loaded; others of this name are cut by groups."""
    shapes = {f"{LAYER}.attention.query_key_value.weight": (64, 32), f"{LAYER}.attention.dense.weight": (32, 32)}
    config = {**HEADS, "architectures": ["SarvamMoEForCausalLM"], "model_type": "sarvam_moe"}
    for library in (True, False):
        tensors = derive(config, shapes.items(), library=library).tensors
        cut = [("tp", [(32, 8), (16, 8), (16, 8)])]
        assert list_cuts(tensors[f"{LAYER}.attention.query_key_value.weight"])[0] == [cut, []]


@pytest.mark.parametrize("library", [True, False], ids=["library", "names"])
@pytest.mark.parametrize("kind", ["inkling_text", "inkling2_text", "inkling2_loop_text"])
def test_gates_and_ups_that_alternate_in_files_are_cut_by_pairs(kind, library):
    base = "model.llm.layers.0.mlp.experts"
    shapes = {f"{base}.w13_weight": (4, 96, 32), f"{base}.w2_weight": (4, 32, 48)}
    architecture = {"inkling2_text": "Inkling2ForCausalLM", "inkling2_loop_text": "Inkling2LoopForCausalLM"}.get(kind)
    config = {"architectures": [architecture or "InklingForCausalLM"], "model_type": kind, "n_routed_experts": 4}
    if kind == "inkling_text":
        config = {"model_type": "inkling_mm_model", "text_config": config}
    derived = derive(config, shapes.items(), library=library)
    assert list_cuts(derived.tensors[f"{base}.w13_weight"])[0] == [[("ep", [(4, 1)])], [("etp", [(96, 2)])], []]


def test_experts_are_numbered_from_zero_or_whole():
    shapes = {
        f"{LAYER}.mlp.experts.{n}.{name}.weight": shape
        for n in range(1, 4)
        for name, shape in (("gate_proj", (16, 32)), ("up_proj", (16, 32)), ("down_proj", (32, 16)))
    }
    cut, uncut = find_cut(shapes)
    assert not cut
    assert set(uncut.values()) == {"its experts are not numbered from 0"}


def test_experts_without_an_output_go_where_a_rule_file_puts_them(tmp_path):
    """transformers 5.23 saves matrices for LongCat's zero experts, which give a token back as it is."""
    expert = (("gate_proj", (16, 32)), ("up_proj", (16, 32)), ("down_proj", (32, 16)))
    shapes = {
        f"{LAYER}.mlp.experts.{n}.{name}.weight": shape for n in range(6) for name, shape in expert[: 3 if n < 4 else 2]
    }
    derived = derive(HEADS, shapes.items(), library=False)
    (tmp_path / "rules.toml").write_text(format_rule_file(derived.derivation))
    read = load_rules(tmp_path / "rules.toml").model(stored(shapes.items()))
    for name, tensor in derived.tensors.items():
        assert list_cuts(tensor) == list_cuts(read.tensors[name]), name
        assert (tensor.spec.member.index, tensor.spec.member.count) == (int(name.split(".")[5]), 6)


def test_experts_are_divided_where_a_library_says_so_under_other_names():
    """Inkling's arrays are called otherwise on the Hub, and its plan for experts speaks of the class's names."""
    text = {"model_type": "inkling_text", "n_routed_experts": 4}
    config = {
        "architectures": ["InklingForConditionalGeneration"],
        "model_type": "inkling_mm_model",
        "text_config": text,
    }
    base = "model.llm.layers.0.mlp"
    shapes = {
        f"{base}.experts.w13_weight": (4, 32, 32),
        f"{base}.experts.w2_weight": (4, 32, 16),
        f"{base}.gate.weight": (6, 32),
        f"{base}.shared_experts.shared_w13_weight": (2, 32, 32),
    }
    derived = derive(config, shapes.items())
    axes = {name.removeprefix(f"{base}."): list_cuts(t)[0] for name, t in derived.tensors.items() if is_cut(t)}
    assert axes == {
        "experts.w13_weight": [[("ep", [(4, 1)])], [("etp", [(32, 2)])], []],
        "experts.w2_weight": [[("ep", [(4, 1)])], [], [("etp", [(16, 1)])]],
    }
    alone = {name: shape for name, shape in shapes.items() if "w13" not in name}
    derived = derive(config, alone.items())
    assert [name for name, t in derived.tensors.items() if is_cut(t)] == [f"{base}.experts.w2_weight"]
    assert [rule.rule.note for rule in derived.derivation.rules] == ["experts; how to cut one is not known"]
    assert "InklingTextConfig of transformers" in derived.derivation.rules[0].rule.origin


def test_experts_under_the_names_of_a_class_have_its_order():
    """Inkling's class computes with gates and then ups; only the Hub's arrays alternate."""
    base = "model.layers.0.mlp.experts"
    shapes = {f"{base}.gate_up_proj": (4, 32, 32), f"{base}.down_proj": (4, 32, 16)}
    config = {"architectures": ["InklingForCausalLM"], "model_type": "inkling_text", "n_routed_experts": 4}
    derived = derive(config, shapes.items())
    cuts = [[("ep", [(4, 1)])], [("etp", [(16, 1), (16, 1)])], []]
    assert list_cuts(derived.tensors[f"{base}.gate_up_proj"])[0] == cuts


@pytest.mark.parametrize(
    ("kind", "beside", "whole"),
    [
        ("muse_glimmer_text", "", True),
        ("llama", "", False),
        ("llama", "embed_tokens.embed_norm.weight", True),
        ("llama", "embed_tokens.eoi_embedding", False),
    ],
)
def test_an_embedding_with_a_norm_inside_stays_whole(kind, beside, whole):
    config = {"architectures": ["NobodyForCausalLM"], "model_type": kind, "vocab_size": 96}
    shapes = {"embed_tokens.weight": (96, 32), "lm_head.weight": (96, 32), **({beside: (32,)} if beside else {})}
    derived = derive(config, shapes.items())
    cut = {name for name, tensor in derived.tensors.items() if is_cut(tensor)}
    assert cut == {"lm_head.weight"} if whole else {"embed_tokens.weight", "lm_head.weight"}
    assert [each.pattern for each in derived.derivation.uncut] == (["embed_tokens.weight"] if whole else [])


def test_a_linear_beside_a_pair_that_nobody_knows_leaves_the_pair_whole():
    """Cutting the two would be wrong if what the third gives is multiplied with what lies between them."""
    pair = {f"{LAYER}.mlp.up_proj.weight": (48, 32), f"{LAYER}.mlp.down_proj.weight": (32, 48)}
    assert find_cut(pair)[0] == {"up_proj", "down_proj"}
    cut, uncut = find_cut({**pair, f"{LAYER}.mlp.scaling.weight": (48, 32)})
    assert not cut
    assert uncut["up_proj"] == "what scaling beside it does is not known"
    cut, _ = find_cut({**pair, f"{LAYER}.mlp.linear_gate.weight": (48, 32)})
    assert cut == {"up_proj", "down_proj", "linear_gate"}


def test_relative_positions_are_cut_by_heads():
    shapes = {
        **ATTENTION,
        f"{LAYER}.self_attn.k_proj.weight": (32, 32),
        f"{LAYER}.self_attn.v_proj.weight": (32, 32),
        f"{LAYER}.self_attn.linear_pos.weight": (32, 32),
        f"{LAYER}.self_attn.pos_bias_u": (4, 8),
    }
    cut, uncut = find_cut(shapes, {**HEADS, "num_key_value_heads": 4})
    assert cut == {"q_proj", "k_proj", "v_proj", "o_proj", "linear_pos", "pos_bias_u"}
    assert not uncut


LATENT = {
    f"{LAYER}.self_attn.q_proj.weight": (48, 32),
    f"{LAYER}.self_attn.kv_a_proj_with_mqa.weight": (12, 32),
    f"{LAYER}.self_attn.kv_b_proj.weight": (64, 8),
    f"{LAYER}.self_attn.o_proj.weight": (32, 40),
}


@pytest.mark.parametrize(("name", "cut"), [("g_proj", True), ("linear_gate", True), ("mixing", False)])
def test_what_stands_beside_latent_attention_is_cut_with_it_or_leaves_it_whole(name, cut):
    found, uncut = find_cut({**LATENT, f"{LAYER}.self_attn.{name}.weight": (40, 32)})
    assert found == ({"q_proj", "kv_b_proj", "o_proj", name} if cut else set())
    assert cut or uncut["q_proj"] == f"what {name} [40, 32] does with its heads is not known"


def test_layers_that_share_keys_are_cut_where_the_config_says_that_they_do():
    queries = {name: shape for name, shape in ATTENTION.items() if "q_proj" in name or "o_proj" in name}
    assert find_cut(queries)[0] == set()
    assert find_cut(queries, {**HEADS, "num_kv_shared_layers": 1})[0] == {"q_proj", "o_proj"}


def test_rules_of_a_model_with_towers_are_a_rule_file(tmp_path):
    shapes = {
        "vision_tower.embeddings.patch_embedding.weight": (32, 3, 4, 4),
        **{f"vision_tower.encoder.layers.0.self_attn.{name}.weight": (32, 32) for name in ("q", "k", "v", "o")},
        "vision_tower.post_layernorm.weight": (32,),
        **ATTENTION,
    }
    derived = derive(HEADS, shapes.items(), library=False)
    (tmp_path / "rules.toml").write_text(format_rule_file(derived.derivation))
    read = load_rules(tmp_path / "rules.toml").model(stored(shapes.items()))
    assert {n: t.spec.where for n, t in read.tensors.items()} == {n: t.spec.where for n, t in derived.tensors.items()}


NAMES = {
    "mixtral": ("model.layers.3.block_sparse_moe.experts.7.w1.weight", "model.layers.3.block_sparse_moe.gate.weight"),
    "minimax_m2": ("model.layers.3.block_sparse_moe.experts.7.w2.weight", "model.layers.0.self_attn.q_proj.weight"),
    "qwen2_moe": ("model.layers.3.mlp.experts.7.down_proj.weight", "model.layers.3.mlp.shared_expert.up_proj.weight"),
    "ernie4_5_moe": (
        "model.layers.3.mlp.experts.7.up_proj.weight",
        "model.layers.3.mlp.moe_statics.e_score_correction_bias",
    ),
    "hy_v3": ("model.layers.3.mlp.experts.7.up_proj.weight", "model.layers.0.mlp.expert_bias"),
}


@pytest.mark.parametrize("kind", NAMES)
def test_names_become_what_transformers_makes_of_them(kind):
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = get_checkpoint_conversion_mapping(kind)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    rename = build_renamer([kind])
    for name in NAMES[kind]:
        assert rename(name) == rename_source_key(name, renamings, converters)[0]
