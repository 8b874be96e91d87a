"""Which weights are quantized, in which arrays, and which cuts go through no block."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from codes import CODECS, LLAMA, encoded, fp8_blocks, gptq, plain_state, quark

from shardctl.base.dtype import BY_TORCH
from shardctl.base.errors import PartitionError, SourceError, UnsupportedError
from shardctl.models import build_rule_table, choose_model, describe_model, find_quantization_config, load_rules
from shardctl.models.names.naming import bind_manifest
from shardctl.tensors.box import Box
from shardctl.tensors.manifest import Chunk, Manifest, Region, Tensor, compute_dense_strides
from shardctl.tensors.mesh import Mesh
from shardctl.tensors.placement import check_cuts, compute_intervals, compute_rank_boxes

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32}
DOWN = "model.layers.0.mlp.down_proj"
UP = "model.layers.0.mlp.up_proj"
PHI3 = {**LLAMA, "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "pad_token_id": 0}
MIXTRAL = {**LLAMA, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4}


def of(settings, **changes):
    """A Llama's config with a quantization_config."""
    return {**LLAMA, **changes, "quantization_config": settings}


def manifest(state):
    """A checkpoint that stores each tensor whole."""
    tensors = {}
    for name, tensor in state.items():
        kind, shape = BY_TORCH[str(tensor.dtype).removeprefix("torch.")], tuple(tensor.shape)
        chunk = Chunk(Box.whole(shape), kind, Region("model.safetensors", 0, compute_dense_strides(kind, shape)), name)
        tensors[name] = Tensor(name, kind, shape, (chunk,))
    return Manifest("safetensors", tensors, {})


def bound(config, state):
    """The checkpoint under canonical names."""
    stored = manifest(state)
    return bind_manifest(choose_model(config, stored), stored)


def checked(config, degrees, state=None):
    """Every tensor of the model against a mesh."""
    mesh = Mesh.of(**degrees)
    model = describe_model(config) if state is None else choose_model(config, manifest(state))
    for tensor in model.own():
        check_cuts(tensor.name, tensor.shape, tensor.spec, mesh)
    return model


def shapes(model, module):
    """The arrays of a module, by the names that follow its own."""
    found = {name: t for name, t in model.tensors.items() if name.startswith(f"{module}.")}
    return {name.removeprefix(f"{module}."): (t.dtype.name, t.shape) for name, t in found.items() if not t.optional}


class TestArraysOfAWeight:
    """`down_proj` is `[128, 256]`: 256 inputs."""

    @pytest.mark.parametrize(
        ("settings", "expected"),
        [
            (FP8, {"weight": ("F8_E4M3", (128, 256)), "weight_scale_inv": ("F32", (1, 2))}),
            (
                {"quant_method": "fp8", "weight_block_size": [100, 100]},
                {"weight": ("F8_E4M3", (128, 256)), "weight_scale_inv": ("F32", (2, 3))},
            ),
            ({"quant_method": "fp8"}, {"weight": ("F8_E4M3", (128, 256)), "weight_scale": ("F32", (1,))}),
            ({"quant_method": "fbgemm_fp8"}, {"weight": ("F8_E4M3", (128, 256)), "weight_scale": ("F32", (128, 1))}),
            (
                GPTQ,
                {"qweight": ("I32", (32, 128)), "qzeros": ("I32", (8, 16)), "scales": ("BF16", (8, 128))},
            ),
            (
                {**GPTQ, "bits": 3, "desc_act": True},
                {
                    "qweight": ("I32", (24, 128)),
                    "qzeros": ("I32", (8, 12)),
                    "scales": ("BF16", (8, 128)),
                    "g_idx": ("I32", (256,)),
                },
            ),
            (
                {**GPTQ, "bits": 8, "group_size": -1},
                {"qweight": ("I32", (64, 128)), "qzeros": ("I32", (1, 32)), "scales": ("BF16", (1, 128))},
            ),
            (AWQ, {"qweight": ("I32", (256, 16)), "qzeros": ("I32", (8, 16)), "scales": ("BF16", (8, 128))}),
            (
                {"quant_method": "modelopt", "quant_algo": "NVFP4"},
                {"weight": ("U8", (128, 128)), "weight_scale": ("F8_E4M3", (128, 16)), "weight_scale_2": ("F32", ())},
            ),
        ],
        ids=str,
    )
    def test_shapes_follow_from_the_config_alone(self, settings, expected):
        assert shapes(describe_model(of(settings)), DOWN) == expected

    @pytest.mark.parametrize("name", CODECS)
    def test_they_are_those_that_are_written(self, name):
        config, state = of(CODECS[name].settings), encoded(CODECS[name], plain_state(LLAMA))
        found = bound(config, state)
        assert {n: t.shape for n, t in found.tensors.items()} == {n: tuple(t.shape) for n, t in state.items()}
        assert found.warnings == ()

    def test_the_rule_table_says_how_their_dims_follow(self):
        rows = {row.pattern: row for row in build_rule_table(describe_model(of(GPTQ)))}
        down = rows["model.layers.*.mlp.down_proj.qzeros"]
        assert (down.dims, down.axes, down.tensors) == ("ffn/32 hidden/8", (("tp", "fsdp"), ()), 2)
        up = rows["model.layers.*.mlp.up_proj.qzeros"]
        assert (up.dims, up.axes) == ("hidden/32 ffn/8", (("fsdp",), ("tp",)))


def local(array, spec, mesh, at):
    """What a rank holds of an array, its boxes joined."""
    index = [
        np.concatenate([np.arange(*part) for part in compute_intervals(extent, cuts, mesh, at)] or [np.arange(0)])
        for extent, cuts in zip(array.shape, spec.cuts, strict=True)
    ]
    return array[np.ix_(*index)] if index else array


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("config", [LLAMA, PHI3, MIXTRAL], ids=lambda c: c["model_type"])
@pytest.mark.parametrize("name", ["fp8-blocks", "gptq-4", "gptq-3", "awq", "modelopt-nvfp4", "fbgemm-fp8"])
def test_a_ranks_part_of_the_arrays_is_its_part_of_the_weight(name, config, tp):
    """Also of fused weights, of which a rank has one part each, and of experts."""
    codec, plain, state = CODECS[name], describe_model(config), plain_state(config)
    if plain.fusions:  # experts, by names of their own
        state = {t.name: torch.randn(t.shape).bfloat16() for t in plain.own()}
    state = {n: t for n, t in state.items() if ".layers.0." in n or ".layers." not in n}
    config = {**config, "num_hidden_layers": 1, "quantization_config": codec.settings}
    routers = tuple(n.removesuffix(".weight") for n in state if n.endswith("block_sparse_moe.gate.weight"))
    stored = encoded(codec.__class__(codec.settings, codec.encode, codec.decode, routers), state)
    model, mesh = choose_model(config, manifest(stored)), Mesh.of(tp=tp)
    compared = 0
    for tensor in plain.own():
        module = tensor.name.removesuffix(".weight")
        arrays = {n.removeprefix(f"{module}."): n for n in stored if n.startswith(f"{module}.") and n != tensor.name}
        if ".layers.0." not in tensor.name or not arrays:
            continue
        if tensor.name in stored:
            arrays["weight"] = tensor.name
        whole = codec.decode({short: stored[full] for short, full in arrays.items()})
        for rank in range(tp):
            at, mine = mesh.coordinate(rank), {}
            for short, full in arrays.items():
                check_cuts(full, model.tensors[full].shape, model.tensors[full].spec, mesh)
                mine[short] = local(stored[full], model.tensors[full].spec, mesh, at)
            assert torch.equal(codec.decode(mine), local(whole, tensor.spec, mesh, at)), (module, rank)
            compared += 1
    assert compared >= 4 * tp


class TestCutsBetweenBlocks:
    @pytest.mark.parametrize(
        ("settings", "changes", "tp", "message", "hint"),
        [
            (FP8, {}, 2, r"q_proj\.weight \[128, 128\] over tp=2: 1 blocks of 128", "use --tp 1"),
            (FP8, {"num_attention_heads": 24, "head_dim": 64}, 24, r"q_proj.* 12 blocks of 128", "1, 2, 3, 4, 6 or 12"),
            (FP8, {"intermediate_size": 384, "hidden_size": 512}, 4, r"gate_proj.* 3 blocks of 128", "--tp 1 or 3"),
            (
                FP8,
                {"intermediate_size": 320, "hidden_size": 512},
                2,
                r"gate_proj\.weight \[320, 512\] .* 1 stretch of 320, which blocks of 128 do not divide",
                "use --tp 1",
            ),
            ({**GPTQ, "group_size": 64}, {}, 4, r"o_proj\.qweight \[16, 128\] .* 2 blocks of 64", "--tp 1 or 2"),
            (GPTQ, {"num_attention_heads": 32, "num_key_value_heads": 32}, 32, r"q_proj.* 16 blocks of 8", "8 or 16"),
            (AWQ, {"num_attention_heads": 32, "num_key_value_heads": 32}, 32, r"q_proj.* 16 blocks of 8", "8 or 16"),
            (
                {**GPTQ, "desc_act": True},
                {},
                2,
                r"o_proj\.qweight .* tp=2: 1 run of inputs, because act-order \(desc_act\) mixed their groups",
                "use --tp 1",
            ),
        ],
    )
    def test_others_are_refused_with_the_degrees_that_work(self, settings, changes, tp, message, hint):
        with pytest.raises(PartitionError, match=message) as caught:
            checked(of(settings, **changes), {"tp": tp})
        assert hint in caught.value.hint

    @pytest.mark.parametrize(
        ("settings", "changes", "tp"),
        [
            (FP8, {"hidden_size": 512, "intermediate_size": 384, "num_attention_heads": 24, "head_dim": 64}, 3),
            ({**GPTQ, "group_size": 64}, {}, 2),
            ({**GPTQ, "group_size": -1, "desc_act": True}, {}, 4),
        ],
    )
    def test_those_degrees_do_work(self, settings, changes, tp):
        changes = {"num_key_value_heads": changes["num_attention_heads"], **changes} if changes else changes
        checked(of(settings, **changes), {"tp": tp})

    @pytest.mark.parametrize("settings", [FP8, {**GPTQ, "desc_act": True}, AWQ], ids=lambda s: s["quant_method"])
    def test_fsdp_and_pp_need_no_blocks(self, settings):
        checked(of(settings), {"pp": 2, "fsdp": 3})

    @pytest.mark.parametrize("size", [300, 256])
    def test_no_legal_cut_goes_through_a_block(self, size):
        """Whatever the degree: either all boundaries of weight and scales agree, or the cut is refused."""
        config = of({"quant_method": "fp8", "weight_block_size": [16, 12]}, intermediate_size=size)
        model = describe_model(config)
        for degree in range(1, size + 1):
            mesh = Mesh.of(tp=degree)
            for module, block in ((UP, 16), (DOWN, 12)):
                dim = 0 if module == UP else 1
                codes, scales = (model.tensors[f"{module}.{n}"] for n in ("weight", "weight_scale_inv"))
                try:
                    check_cuts(codes.name, codes.shape, codes.spec, mesh)
                except PartitionError:
                    with pytest.raises(PartitionError):
                        check_cuts(scales.name, scales.shape, scales.spec, mesh)
                    continue
                for rank in range(degree):
                    at = mesh.coordinate(rank)
                    (mine,), (own,) = (compute_rank_boxes(t.shape, t.spec, mesh, at) for t in (codes, scales))
                    assert mine.origin[dim] == own.origin[dim] * block
                    assert mine.stop[dim] == min(own.stop[dim] * block, size)

    def test_key_value_heads_are_shared_only_whole_blocks_at_a_time(self):
        narrow = of({"quant_method": "fp8", "weight_block_size": [32, 32]}, num_key_value_heads=2)
        wide = of({"quant_method": "fp8", "weight_block_size": [16, 16]}, num_key_value_heads=2)
        name, mesh = "model.layers.0.self_attn.k_proj.weight", Mesh.of(tp=4)
        tensor = describe_model(wide, kv_heads="replicate").tensors[name]  # a head is a block
        check_cuts(name, tensor.shape, tensor.spec, mesh)
        assert [
            compute_rank_boxes(tensor.shape, tensor.spec, mesh, mesh.coordinate(r))[0].origin[0] for r in range(4)
        ] == [
            0,
            0,
            16,
            16,
        ]
        tensor = describe_model(narrow, kv_heads="replicate").tensors[name]  # two heads are
        with pytest.raises(PartitionError, match="1 blocks of 32"):
            check_cuts(name, tensor.shape, tensor.spec, mesh)


LINEAR = {
    f"model.layers.{n}.{part}"
    for n in range(2)
    for part in (*(f"self_attn.{p}_proj" for p in "qkvo"), *(f"mlp.{p}_proj" for p in ("gate", "up", "down")))
}


class TestWhichWeights:
    def quantised(self, settings, config=LLAMA, state=None):
        full = {**config, "quantization_config": settings}
        model = describe_model(full) if state is None else choose_model(full, manifest(state))
        plain = describe_model(config)
        return {
            t.name.removesuffix(".weight")
            for t in plain.own()
            if t.name not in model.tensors or model.tensors[t.name].dtype != t.dtype
        }

    def test_linear_ones_and_neither_embeddings_nor_norms_nor_the_head(self):
        assert self.quantised(FP8) == self.quantised(GPTQ) == self.quantised(AWQ) == LINEAR

    def test_the_head_if_the_config_says_so(self):
        assert self.quantised({**GPTQ, "lm_head": True}) == {*LINEAR, "lm_head"}
        assert self.quantised({**FP8, "modules_to_not_convert": []}) == {*LINEAR, "lm_head"}
        assert self.quantised({**FP8, "modules_to_not_convert": ["lm_head"]}) == LINEAR
        group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}}
        settings = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"0": group}}
        assert self.quantised(settings) == {*LINEAR, "lm_head"}
        assert self.quantised({**settings, "ignore": ["lm_head"]}) == LINEAR

    @pytest.mark.parametrize(
        ("listed", "left"),
        [
            (["mlp.gate"], set()),
            (["gate"], set()),
            (["model.layers.1"], {m for m in LINEAR if ".1." in m}),
            (["layers.1"], {m for m in LINEAR if ".1." in m}),
            (["up_proj", "lm_head"], {m for m in LINEAR if m.endswith("up_proj")}),
            (["proj"], set()),
            ([r"model\.layers\.\d+\.self_attn"], {m for m in LINEAR if "self_attn" in m}),
            (["layers.*.mlp"], {m for m in LINEAR if "mlp" in m}),
        ],
    )
    @pytest.mark.parametrize("key", ["modules_to_not_convert", "ignored_layers"])
    def test_lists_of_modules_mean_whole_parts(self, listed, left, key):
        assert self.quantised({**FP8, key: [*listed, "lm_head"]}) == LINEAR - left

    @pytest.mark.parametrize(
        ("ignore", "left"),
        [
            (["up_proj"], set()),
            (["model.layers.0.mlp.up_proj"], {"model.layers.0.mlp.up_proj"}),
            ([r"re:.*self_attn.*"], {m for m in LINEAR if "self_attn" in m}),
            ([r"re:.*layers\.1\."], {m for m in LINEAR if ".1." in m}),
        ],
    )
    def test_compressed_tensors_lists_mean_names_and_marked_expressions(self, ignore, left):
        group = {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32}}
        settings = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"0": group}}
        assert self.quantised({**settings, "ignore": [*ignore, "lm_head"]}) == LINEAR - left

    def test_groups_of_compressed_tensors_have_each_their_own_form(self):
        def group(targets, form, **weights):
            return {"targets": targets, "format": form, "weights": weights}

        settings = {
            "quant_method": "compressed-tensors",
            "format": "mixed-precision",
            "config_groups": {
                "0": group(["re:.*down_proj$"], "float-quantized", num_bits=8, type="float", strategy="channel"),
                "1": group(["re:.*up_proj$", "model.layers.0.mlp.gate_proj"], "pack-quantized", num_bits=4),
            },
        }
        model = describe_model(of(settings))
        assert shapes(model, DOWN) == {"weight": ("F8_E4M3", (128, 256)), "weight_scale": ("F32", (128, 1))}
        assert set(shapes(model, UP)) == {"weight_packed", "weight_scale", "weight_shape"}
        expected = {m for m in LINEAR if m.endswith(("down_proj", "up_proj"))} | {"model.layers.0.mlp.gate_proj"}
        assert self.quantised(settings) == expected

    def test_gptq_can_list_what_it_quantizes(self):
        settings = {**GPTQ, "modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.up_proj"]]}
        assert self.quantised(settings) == {m for m in LINEAR if m.endswith(("q_proj", "up_proj"))}

    def test_what_is_stored_decides_where_the_config_is_silent(self):
        state = encoded(gptq(4, 32), plain_state(LLAMA))
        plain = plain_state(LLAMA)[f"{UP}.weight"]
        state = {n: t for n, t in state.items() if not n.startswith(UP)} | {f"{UP}.weight": plain}
        assert self.quantised(GPTQ, state=state) == LINEAR - {UP}
        assert not bound(of(GPTQ), state).warnings

    def test_a_quantized_weight_that_the_config_spares_is_understood_and_named(self):
        codec = fp8_blocks(16, 16)
        settings = {**codec.settings, "modules_to_not_convert": ["lm_head", UP]}
        found = bound(of(settings), encoded(codec, plain_state(LLAMA)))
        assert found.warnings == (f"config.json says that {UP} is not quantized, but it is",)
        assert f"{UP}.weight_scale_inv" in found.tensors

    def test_routers_are_spared_and_experts_are_not(self):
        model = describe_model({**MIXTRAL, "quantization_config": AWQ})
        assert shapes(model, "model.layers.0.block_sparse_moe.gate") == {"weight": ("BF16", (4, 128))}
        assert set(shapes(model, "model.layers.0.block_sparse_moe.experts.3.w1")) == {"qweight", "qzeros", "scales"}
        member = model.tensors["model.layers.0.block_sparse_moe.experts.3.w1.qzeros"].spec.member
        assert (member.axis, member.index, member.count) == ("ep", 3, 4)
        assert all(len(f.tensors) == 1 for f in model.fusions.values())  # stacks of weights that are no more

    def test_scales_of_the_cache_are_kept(self):
        codec = fp8_blocks(16, 16)
        more = {
            "model.layers.0.self_attn.k_scale": torch.ones(1),
            "model.layers.1.self_attn.v_proj.v_scale": torch.ones(()),
        }
        found = bound(of(codec.settings), encoded(codec, plain_state(LLAMA)) | more)
        assert more.keys() <= found.tensors.keys()

    def test_names_without_the_prefix_are_understood(self):
        state = encoded(CODECS["awq"], plain_state(LLAMA))
        short = {name.removeprefix("model."): tensor for name, tensor in state.items()}
        assert set(bound(of(CODECS["awq"].settings), short).tensors) == set(state)

    def test_a_config_without_quantization_changes_nothing(self):
        assert find_quantization_config(LLAMA) is None
        assert find_quantization_config({"compression_config": FP8}).values == FP8
        assert find_quantization_config({"text_config": {"quantization_config": FP8}}).values == FP8
        assert describe_model({**LLAMA, "quantization_config": None}).tensors == describe_model(LLAMA).tensors

    def test_blocks_that_a_familys_own_table_has_are_left_to_it(self):
        assert describe_model(of({"quant_method": "mxfp4"})).tensors == describe_model(LLAMA).tensors


class TestOtherwiseForSomeModules:
    """GPTQ's `dynamic`, AutoRound's `extra_config`, Quark's `layer_quant_config`: the first that matches decides."""

    def arrays(self, settings):
        model = describe_model(of(settings))
        return {module: shapes(model, module) for module in (UP, DOWN, "model.layers.1.mlp.up_proj", "lm_head")}

    @pytest.mark.parametrize(
        "settings",
        [
            {
                **GPTQ,
                "dynamic": {r"-:.*\.1\..*": {}, r"+:.*up_proj": {"bits": 8, "group_size": 64}, ".*up": {"bits": 2}},
            },
            {
                "quant_method": "auto-round",
                "bits": 4,
                "group_size": 32,
                "packing_format": "auto_round:auto_gptq",
                "extra_config": {
                    "model.layers.1.mlp.up_proj": {"bits": 16},
                    r"layers\.[0-9]+\.mlp\.up": {"bits": 8, "group_size": 64},
                },
            },
        ],
        ids=["gptq", "auto-round"],
    )
    def test_integers(self, settings):
        found = self.arrays(settings)
        assert found[UP]["qweight"] == ("I32", (32, 256))
        assert found[UP]["scales"] == ("BF16", (2, 256))
        assert found[DOWN]["qweight"] == ("I32", (32, 128))
        assert found["model.layers.1.mlp.up_proj"] == {"weight": ("BF16", (256, 128))}
        assert found["lm_head"] == {"weight": ("BF16", (96, 128))}

    def test_quark(self):
        settings = {
            **quark("fp8_e4m3", "per_channel"),
            "layer_quant_config": {
                "*.0.mlp.up_proj": {"weight": [{"dtype": "int8", "qscheme": "per_tensor"}]},
                "*.1.mlp.*": {"weight": None},
            },
            "exclude": ["re:.*lm_head"],
        }
        found = self.arrays(settings)
        assert found[UP] == {"weight": ("I8", (256, 128)), "weight_scale": ("F32", ())}
        assert found[DOWN] == {"weight": ("F8_E4M3", (128, 256)), "weight_scale": ("F32", (128,))}
        assert found["model.layers.1.mlp.up_proj"] == {"weight": ("BF16", (256, 128))}
        assert found["lm_head"] == {"weight": ("BF16", (96, 128))}

    @pytest.mark.parametrize(
        ("settings", "error", "message"),
        [
            ({**GPTQ, "dynamic": {"(a*)*": {}}}, SourceError, "could take for ever"),
            ({**GPTQ, "dynamic": {"a": 8}}, SourceError, "a table of modules is expected"),
            (
                {"quant_method": "auto-round", "bits": 4, "group_size": 32, "packing_format": "auto_round:gguf"},
                UnsupportedError,
                "AutoRound's int weights in the format 'auto_round:gguf' are not known",
            ),
            ({"quant_method": "auto-round", "bits": 4, "extra_config": [1]}, SourceError, "a table of modules"),
            ({"quant_method": "auto-round", "bits": 16}, UnsupportedError, "weights of 16 bits"),
            (quark("fp6_e2m3", "per_group"), UnsupportedError, "Quark's fp6_e2m3 per group is not known"),
            (quark("fp8_e4m3", "per_block"), SourceError, "no block_size"),
            ({"quant_method": "quark"}, UnsupportedError, "names no quantized weights"),
        ],
    )
    def test_what_is_not_known_is_named(self, settings, error, message):
        with pytest.raises(error, match=message):
            describe_model(of(settings))


class TestMistakes:
    @pytest.mark.parametrize(
        ("codec", "lost"),
        [("fp8-blocks", "weight_scale_inv"), ("gptq-4", "scales"), ("awq", "qzeros"), ("gptq-4", "qweight")],
    )
    def test_a_lost_array_is_named(self, codec, lost):
        state = encoded(CODECS[codec], plain_state(LLAMA))
        del state[f"{UP}.{lost}"]
        with pytest.raises(SourceError, match=f"lacks 1 tensor of LlamaForCausalLM: {UP}.{lost}"):
            bound(of(CODECS[codec].settings), state)

    def test_scales_without_a_weight_are_named(self):
        state = encoded(CODECS["fp8-blocks"], plain_state(LLAMA))
        del state[f"{UP}.weight"]
        with pytest.raises(SourceError, match=f"lacks 1 tensor of LlamaForCausalLM: {UP}.weight"):
            bound(of(CODECS["fp8-blocks"].settings), state)

    def test_scales_of_another_block_size_are_named(self):
        state = encoded(fp8_blocks(32, 32), plain_state(LLAMA))
        with pytest.raises(
            SourceError, match=r"weight_scale_inv has shape \[4, 4\], but config.json gives it \[8, 8\]"
        ):
            bound(of(fp8_blocks(16, 16).settings), state)

    def test_codes_that_were_cast_are_named(self):
        state = encoded(CODECS["fp8-blocks"], plain_state(LLAMA))
        state[f"{UP}.weight"] = state[f"{UP}.weight"].bfloat16()
        with pytest.raises(SourceError, match=f"{UP}.weight is BF16, but its quantization_config has F8_E4M3 there"):
            bound(of(CODECS["fp8-blocks"].settings), state)

    def test_arrays_that_nothing_needs_are_named(self):
        state = encoded(CODECS["awq"], plain_state(LLAMA)) | {f"{UP}.absmax": torch.ones(2)}
        assert bound(of(CODECS["awq"].settings), state).extra.keys() == {f"{UP}.absmax"}

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"quant_method": "eetq"}, "quantized weights by 'eetq' are not known"),
            ({}, "quantization_config names no quant_method"),
            ({**AWQ, "version": "gemv_fast"}, "AWQ weights in the format 'gemv_fast'"),
            ({**GPTQ, "checkpoint_format": "marlin_24"}, "GPTQ weights in the format 'marlin_24'"),
            ({"quant_method": "bitsandbytes"}, "neither load_in_4bit nor load_in_8bit"),
            (
                {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "af4"},
                "no 4-bit type 'af4'",
            ),
            ({**FP8, "expert_dtype": "int3"}, "experts of this fp8 checkpoint are int3"),
            (
                {"quant_method": "compressed-tensors", "config_groups": {"0": {"weights": {}}}, "format": "marlin-24"},
                "the compressed-tensors format 'marlin-24' is not known",
            ),
            (
                {"config_groups": {"0": {"weights": {"strategy": "attn_head"}}}, "format": "pack-quantized"},
                "by 'attn_head' are not known",
            ),
            (
                {"config_groups": {"0": {}}, "sparsity_config": {"format": "sparse-24-bitmask"}},
                "sparse compressed-tensors format 'sparse-24-bitmask'",
            ),
        ],
    )
    def test_what_is_not_known_is_named(self, settings, message):
        with pytest.raises(UnsupportedError, match=message):
            describe_model(of(settings))

    def test_gpt2_has_its_weights_the_other_way_round(self):
        sizes = {"n_embd": 32, "n_head": 4, "n_layer": 1, "vocab_size": 96, "n_positions": 16}
        config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", **sizes, "quantization_config": GPTQ}
        with pytest.raises(UnsupportedError, match=r"GPT2LMHeadModel, which are \[in, out\]"):
            describe_model(config)

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({**FP8, "weight_block_size": [128]}, "two positive whole numbers"),
            ({**FP8, "weight_block_size": [128, 0]}, "two positive whole numbers"),
            ({**FP8, "modules_to_not_convert": "lm_head"}, "a list of names is expected"),
            ({**FP8, "modules_to_not_convert": ["(", "lm_head"]}, "not a regular expression"),
            ({**GPTQ, "bits": 5}, "bits = 5 where one of 2, 3, 4, 8"),
            ({**GPTQ, "group_size": 0}, "group_size = 0"),
            ({**GPTQ, "modules_in_block_to_quantize": {}}, None),
            ({**GPTQ, "modules_in_block_to_quantize": [[1]]}, "lists of names"),
            ({**GPTQ, "modules_in_block_to_quantize": "q"}, "lists of names"),
            ({**GPTQ, "dynamic": [1]}, "a table of modules"),
            ({"quant_method": "compressed-tensors"}, "a table of groups"),
            ({"config_groups": {"0": {"weights": {"num_bits": 16}}}, "format": "pack-quantized"}, "1 to 8"),
        ],
    )
    def test_settings_that_make_no_sense_are_named(self, settings, message):
        if message is None:
            describe_model(of(settings))
            return
        with pytest.raises(SourceError, match=message):
            describe_model(of(settings))


DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 8,  # of 256
    "n_shared_experts": 1,
    "num_attention_heads": 128,
    "num_hidden_layers": 4,  # of 61
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "first_k_dense_replace": 3,
    "quantization_config": FP8,
}


def test_deepseek_v3_is_cut_where_its_blocks_end():
    """A head of q has 192 rows, so that two heads are three blocks; kv_a's last block is half a block."""
    model = checked(DEEPSEEK, {"tp": 16})
    attention = "model.layers.3.self_attn"
    assert shapes(model, f"{attention}.kv_a_proj_with_mqa")["weight_scale_inv"] == ("F32", (5, 56))
    (exact, _), _ = model.tensors[f"{attention}.q_b_proj.weight_scale_inv"].spec.cuts
    assert (exact.sections[0].size, exact.sections[0].unit) == (192, 3)
    assert shapes(model, "model.layers.3.mlp.gate")["weight"] == ("BF16", (8, 7168))  # as is usual beside codes
    with pytest.raises(PartitionError, match="144 blocks of 128"):
        checked(DEEPSEEK, {"tp": 64})


def test_deepseeks_layer_that_predicts_is_understood_as_it_is_stored():
    sizes = {"hidden_size": 64, "intermediate_size": 96, "kv_lora_rank": 32, "moe_intermediate_size": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 48, "v_head_dim": 16}
    more = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "vocab_size": 96, "num_hidden_layers": 1}
    codec = fp8_blocks(16, 16)
    config = {**DEEPSEEK, **sizes, **heads, **more, "first_k_dense_replace": 0, "quantization_config": codec.settings}
    plain = describe_model({key: value for key, value in config.items() if key != "quantization_config"})
    spared = ("model.layers.0.mlp.gate", "model.layers.1.mlp.gate", "model.layers.1.eh_proj")
    spared += ("model.layers.1.embed_tokens", "model.layers.1.shared_head.head")
    state = {t.name: torch.randn(t.shape).bfloat16() for t in plain.tensors.values() if not t.row.buffer and not t.free}
    assert "model.layers.1.eh_proj.weight" in state
    found = bound(config, encoded(codec.__class__(codec.settings, codec.encode, codec.decode, spared), state))
    assert found.tensors["model.layers.1.eh_proj.weight"].dtype.name == "BF16"
    assert "model.layers.1.mlp.experts.0.up_proj.weight_scale_inv" in found.tensors
    assert found.warnings == ()


def test_a_rule_file_can_say_how_unknown_quantized_weights_are_cut(tmp_path):
    rules = tmp_path / "rules.toml"
    rules.write_text('[rules]\n"**.up_proj.W_q" = ["tp"]\n"**" = []\n')
    state = plain_state(LLAMA)
    state[f"{UP}.W_q"] = state.pop(f"{UP}.weight")
    model = choose_model(of({"quant_method": "eetq"}), manifest(state), load_rules(rules))
    assert [cut.axis for cut in model.tensors[f"{UP}.W_q"].spec.cuts[0]] == ["tp"]
    assert bind_manifest(model, manifest(state)).tensors.keys() == state.keys()
