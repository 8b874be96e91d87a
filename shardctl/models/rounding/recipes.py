"""Lists the formats that weights are quantized to without data, as compressed-tensors stores and describes them.

Presets: compressed-tensors 0.20 (quantization/quant_scheme.py). Those that need data have no recipe: activations whose
scales are calibrated (FP8, NVFP4), GPTQ, AWQ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from shardctl.base.value import value_class
from shardctl.models.quantization.storage import WORD

_Settings = Mapping[str, Any]
_CODE_TYPES: Final = {"fp8": "F8_E4M3", "int8": "I8", "fp4": "U8", "int4": "I32"}
_PER_UNIT: Final = {"fp8": 1, "int8": 1, "fp4": 2, "int4": WORD // 4}


@value_class
class RoundingRecipe:
    """One such format."""

    name: str
    """What `--quantize` calls it."""
    form: str
    """What compressed-tensors calls the way the arrays are stored."""
    number: Literal["fp8", "fp4", "int8", "int4"]
    block: tuple[int, int]
    """Outputs and inputs that share a scale; 0 for all of them."""
    weights: _Settings
    inputs: _Settings | None
    """How engines are to quantize activations, while they run; None if they are not to."""
    scale: Literal["float", "exponent", "fp8", "exact"] = "float"
    """What scales are: of the weight's type, exponents alone, or FP8 beside one number for the whole weight; or
    exponents with which every value is held exactly, where that is an error otherwise."""

    @property
    def code_type(self) -> str:
        """The element type of the array of codes."""
        return _CODE_TYPES[self.number]

    @property
    def per_unit(self) -> int:
        """Inputs whose codes are in one element of that array."""
        return _PER_UNIT[self.number]

    @property
    def codes_name(self) -> str:
        """What that array is called."""
        return "weight_packed" if self.per_unit > 1 else "weight"

    @property
    def whole(self) -> bool:
        """Whether a number depends on all elements of a weight."""
        return self.scale == "fp8" or self.block == (0, 0)

    def build_config(self, ignore: Sequence[str]) -> dict[str, Any]:
        """Build the `quantization_config`, as `ModelCompressor.update_config` of compressed-tensors does."""
        group = {
            "format": self.form,
            "input_activations": None if self.inputs is None else _complete_settings(self.inputs),
            "output_activations": None,
            "targets": ["Linear"],
            "weights": _complete_settings(self.weights),
        }
        return {
            "config_groups": {"group_0": group},
            "format": self.form,
            "global_compression_ratio": None,
            "ignore": list(ignore),
            "kv_cache_scheme": None,
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "sparsity_config": {},
            "transform_config": {},
        }


def _complete_settings(settings: _Settings) -> dict[str, Any]:
    return {"dynamic": False, "group_size": None, "symmetric": True, **settings}


def find_recipe(settings: Mapping[str, Any]) -> RoundingRecipe | None:
    """Find the recipe whose weights a `quantization_config` describes; None if there is none."""
    groups = settings.get("config_groups")
    group = next(iter(groups.values())) if isinstance(groups, dict) and len(groups) == 1 else None
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        return None
    for recipe in RECIPES.values():
        wanted = _complete_settings(recipe.weights)
        if settings.get("format") == recipe.form and all(weights.get(key) == value for key, value in wanted.items()):
            return recipe
    return None


def _build_float(bits: int, strategy: str, **more: object) -> dict[str, Any]:
    return {"num_bits": bits, "strategy": strategy, "type": "float", **more}


_BY_TOKEN: Final = _build_float(8, "token", dynamic=True)
_EXPONENT_SCALE_SETTINGS: Final = {"scale_dtype": "torch.uint8"}
_MXFP8_SETTINGS: Final = _build_float(8, "group", group_size=32, **_EXPONENT_SCALE_SETTINGS)
_MXFP4_SETTINGS: Final = _build_float(4, "group", group_size=32, **_EXPONENT_SCALE_SETTINGS)
_NVFP4_SETTINGS: Final = _build_float(4, "tensor_group", group_size=16, scale_dtype="torch.float8_e4m3fn")
_FP8_BLOCK_SETTINGS: Final = _build_float(8, "block", block_structure=[128, 128])
_INPUT_GROUPS: Final = _build_float(8, "group", group_size=128, dynamic=True)
_INT8_SETTINGS: Final = {"num_bits": 8, "strategy": "channel", "type": "int"}
_INT8_INPUTS: Final = {"num_bits": 8, "strategy": "token", "type": "int", "dynamic": True}
_INT4_SETTINGS: Final = {"num_bits": 4, "strategy": "group", "group_size": 128, "type": "int"}
RECIPES: Final = {
    recipe.name: recipe
    for recipe in (
        RoundingRecipe("fp8-block", "float-quantized", "fp8", (128, 128), _FP8_BLOCK_SETTINGS, _INPUT_GROUPS),
        RoundingRecipe("fp8-channel", "float-quantized", "fp8", (1, 0), _build_float(8, "channel"), _BY_TOKEN),
        RoundingRecipe("fp8-tensor", "float-quantized", "fp8", (0, 0), _build_float(8, "tensor"), _BY_TOKEN),
        RoundingRecipe(
            "mxfp8",
            "mxfp8-quantized",
            "fp8",
            (1, 32),
            _MXFP8_SETTINGS,
            {**_MXFP8_SETTINGS, "dynamic": True},
            "exponent",
        ),
        RoundingRecipe("mxfp4", "mxfp4-pack-quantized", "fp4", (1, 32), _MXFP4_SETTINGS, None, "exponent"),
        RoundingRecipe("nvfp4", "nvfp4-pack-quantized", "fp4", (1, 16), _NVFP4_SETTINGS, None, "fp8"),
        RoundingRecipe("int8", "int-quantized", "int8", (1, 0), _INT8_SETTINGS, _INT8_INPUTS),
        RoundingRecipe("int4", "pack-quantized", "int4", (1, 128), _INT4_SETTINGS, None),
    )
}
"""By name."""
