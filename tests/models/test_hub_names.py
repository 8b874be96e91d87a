"""The table of the Hub's names is what the installed transformers says; arrays are described as it converts them."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from transformers import core_model_loading as loading

from shardctl.base.errors import UnsupportedError
from shardctl.models.names.hub import find_tied_names
from shardctl.models.names.hub.composed_array import HubArray
from shardctl.models.names.hub.conversion_table import SAVED_AS, NameRenamer, _read_table, find_conversions
from shardctl.models.names.hub.saving_operations import OPERATIONS, OperationContext, apply_operation

BENCHMARKS = Path(__file__).parents[2] / "docs" / "benchmarks"
TABLE = _read_table()
CLASSES = (
    *("BarkModel", "Ernie4_5_VLMoeForConditionalGeneration", "Glm4MoeForCausalLM", "GPTNeoXForCausalLM"),
    *("Kimi_K25ForConditionalGeneration", "LlavaForConditionalGeneration", "MarianMTModel", "MimiModel"),
    *("Qwen2_5OmniThinkerForConditionalGeneration", "Step3p7ForConditionalGeneration", "T5ForConditionalGeneration"),
)
"""Those with models inside, ties of their own, or something that is not saved."""


@pytest.fixture(scope="module")
def freezing():
    """The program that freezes the table."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        spec = importlib.util.spec_from_file_location("freeze_conversions", BENCHMARKS / "freeze_conversions.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(BENCHMARKS))


class TestTable:
    def test_the_installed_transformers_is_the_one_that_was_frozen(self):
        assert transformers.__version__.startswith(f"{SAVED_AS}.")
        assert TABLE["transformers"] == transformers.__version__

    def test_conversions_are_those_of_the_installed_transformers(self, freezing):
        assert TABLE["conversions"] == json.loads(json.dumps(freezing.list_conversions()))

    @pytest.mark.parametrize("name", CLASSES)
    def test_classes_are_those_of_the_installed_transformers(self, freezing, name):
        described, _ = freezing.describe_class(freezing.build_on_meta(getattr(transformers, name)))
        kept = [
            part
            for part in described["parts"]
            if part["class"] in {p["class"] for p in TABLE["classes"][name]["parts"]}
        ]
        assert TABLE["classes"].get(name) == json.loads(json.dumps(described | {"parts": kept}))

    def test_every_operation_of_the_table_is_known(self):
        lists = (each for each in TABLE["conversions"].values() if isinstance(each, list))
        used = {name for each in lists for one in each for name, *_ in one["save"].get("operations", ())}
        assert used == OPERATIONS


class TestNames:
    def test_a_class_has_its_own_list_before_that_of_its_type(self):
        conversions = find_conversions("GPTNeoXForCausalLM", {"model_type": "gpt_neox"})
        assert NameRenamer(conversions.saving_renames).rename("lm_head.weight") == "embed_out.weight"
        assert not find_conversions("GPTNeoXModel", {"model_type": "gpt_neox"}).saving

    @pytest.mark.parametrize(("kind", "prefix"), [("clip_vision_model", ""), ("step3p5_vision", "model.vision_model.")])
    def test_a_model_inside_is_that_of_its_config(self, kind, prefix):
        """Llava's vision model is any that AutoModel knows; the list of another's applies to its names alone."""
        config = {"model_type": "llava", "vision_config": {"model_type": kind}}
        scopes = {each.scope for each in find_conversions("LlavaForConditionalGeneration", config).saving}
        assert ("vision_tower" in scopes) == bool(prefix)

    def test_a_class_that_transformers_lacks_is_that_of_its_type(self):
        """As AutoModel has it: the Hub's own code for Sarvam is `SarvamMoEForCausalLM`."""
        config = {"model_type": "sarvam_moe"}
        known, lacked = (find_conversions(name, config) for name in ("Glm4MoeForCausalLM", "SarvamMoEForCausalLM"))
        assert lacked == known
        assert known.saving

    def test_renames_of_a_group_wait_for_the_first(self):
        """Kimi K2.5: norm0 and norm1 of the Hub are norm1 and norm2; names that were converted stay."""
        conversions = find_conversions("Kimi_K25ForConditionalGeneration", {"model_type": "kimi_k25"})
        block = "model.vision_tower.layers.0."
        saved = NameRenamer(conversions.saving_renames)
        assert [saved.rename(f"{block}norm{n}.weight").split(".")[-2] for n in (1, 2)] == ["norm0", "norm1"]

    def test_names_of_the_hub_are_known_from_those_in_memory(self):
        conversions = find_conversions("LlavaForConditionalGeneration", {"model_type": "llava"})
        assert conversions.reads_as_saved(["language_model.model.norm.weight", "language_model.lm_head.weight"])
        assert not conversions.reads_as_saved(["model.language_model.norm.weight", "lm_head.weight"])

    @pytest.mark.parametrize(("tied", "found"), [(True, {"lm_head.weight": "transformer.w.weight"}), (False, {})])
    def test_ties_are_those_that_the_config_wants(self, tied, found):
        config = {"architectures": ["CTRLLMHeadModel"], "model_type": "ctrl", "tie_word_embeddings": tied}
        assert find_tied_names(config, ["transformer.w.weight", "lm_head.weight"]) == found


CONFIG = {"num_attention_heads": 4, "vocab_size": 9, "split_ngram_parts": 3}
CASES = (
    ("Chunk", {"dim": 1}, [(4, 6)], 2),
    ("Chunk", {"dim": 0}, [(5, 2)], 3),
    ("Chunk", {"dim": 0, "num_shards_attribute": "split_ngram_parts"}, [(7, 2)], 1),
    ("Concatenate", {"dim": 0}, [(4, 6), (2, 6), (2, 6)], 1),
    ("SplitModulelist", {"dim": 0}, [(3, 4, 2)], 1),
    ("SplitModulelist", {"dim": 0}, [(3, 4, 2), (3, 4, 2)], 1),
    ("Transpose", {"dim0": 1, "dim1": 2}, [(3, 4, 2)], 1),
    ("Interleave", {"dim": 1, "inverse": True}, [(2, 6, 3)], 1),
    ("Interleave", {"dim": 0}, [(6, 3)], 1),
    ("PermuteForRope", {"inverse": True}, [(16, 3)], 1),
    ("PermuteForRope", {}, [(24, 3)], 1),
    ("PermuteForRope", {"inverse": True}, [(16,)], 1),
    ("ErnieSplitAndDecoupleTextVisionExperts", {"stack_dim": 0, "concat_dim": 1}, [(3, 4, 2), (3, 4, 2)], 2),
    ("Inkling2UnpadVocab", {"inverse": True}, [(7, 3)], 1),
    ("Inkling2LoopMergeMessageQueries", {"inverse": True}, [(3, 4, 5)], 2),
    ("Inkling2LoopDequantizeExperts", {}, [(3, 4, 2)], 1),
)


@pytest.mark.parametrize(("name", "settings", "shapes", "targets"), CASES)
def test_an_operation_does_to_descriptions_what_it_does_to_arrays(name, settings, shapes, targets):
    sources = tuple(f"s{n}.*" if name == "SplitModulelist" else f"s{n}" for n in range(len(shapes)))
    star = name in {"SplitModulelist", "ErnieSplitAndDecoupleTextVisionExperts"} or "num_shards_attribute" in settings
    new = tuple(f"t{n}.*" if star else f"t{n}" for n in range(targets))
    tensors = [torch.arange(int(np.prod(shape))).reshape(shape) + 1 + 1000 * n for n, shape in enumerate(shapes)]
    config = transformers.PreTrainedConfig(**CONFIG)
    config.get_text_config = lambda: config
    theirs = getattr(loading, name)(**settings).convert(
        {source: [tensor] for source, tensor in zip(sources, tensors, strict=True)},
        source_patterns=list(sources),
        target_patterns=list(new),
        config=config,
        model=None,
        full_layer_name="t0",
    )
    described = {s: [HubArray.of_tensor(n, shape)] for n, (s, shape) in enumerate(zip(sources, shapes, strict=True))}
    ours = apply_operation(name, settings, described, OperationContext(sources, new, CONFIG))
    assert list(ours) == list(theirs)
    for target, (array,) in ours.items():
        expected = theirs[target][0] if isinstance(theirs[target], list) else theirs[target]
        assert torch.equal(build_array(array, tensors), expected), target


def build_array(array, tensors):
    """The array that a description is of, from the tensors themselves."""
    built = np.zeros(array.shape, np.int64)
    for tensor, box, view in array.slices:
        for index in np.ndindex(box.shape):
            at = list(view.origin)
            for axis, step, offset in zip(view.axes, view.steps, index, strict=True):
                if axis >= 0:
                    at[axis] += step * offset
            assert built[tuple(at)] == 0, "two tensors have one element"
            built[tuple(at)] = tensors[tensor][tuple(np.add(box.origin, index))]
    return torch.from_numpy(built)


def test_an_order_that_the_config_does_not_tell_is_refused():
    array = {"wq": [HubArray.of_tensor(0, (16, 3))]}
    with pytest.raises(UnsupportedError, match="does not say num_attention_heads"):
        apply_operation("PermuteForRope", {"inverse": True}, array, OperationContext(("wq",), ("q",), {}))
