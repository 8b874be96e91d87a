"""Describes layers that predict further tokens: DeepSeek's, numbered behind the last, as Megatron-LM's `mtp.layers`.

Names are those of Megatron-LM core (`transformer/multi_token_prediction.py`), whose layer uses the model's own
embedding and head: copies of them, as DeepSeek-V3's files have, have no place. Such layers are on the last stage.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from shardctl.libraries.megatron.hybrid_layers import FURTHER, format_further_letters, list_hybrid_arrays
from shardctl.libraries.megatron.layers import is_hybrid, list_layer_arrays
from shardctl.libraries.megatron.whole_array import WholeArray

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from shardctl.libraries.arrays.schema import ModelParts
    from shardctl.libraries.megatron.layers import LayerVariant
    from shardctl.libraries.writer import PackRequest
    from shardctl.models import Model

COUNT: Final = "further_layers"
"""The fact that says how many such layers the files hold."""
INNER: Final = "transformer_layer."
"""What stands before the names of the layer proper; core 0.17 and later call the module `mtp_model_layer`."""
_HYBRID_LAYER_PREFIX: Final = "mtp_model_layer."
"""The same in hybrid models, which predict since core 0.17 only; each of the module's layers is of one kind."""
LEFT_BEHIND: Final = re.compile(r"(?:.*/)?mtp\..+")
"""Names of arrays that are left behind where the model has no such layers."""
_MTP_LAYER_PATTERN: Final = re.compile(r"(?:.*/)?mtp\.layers\.(\d+)\..+")
_MTP_INPUT_MODULES: Final = (("enorm", None), ("hnorm", None), ("eh_proj", 0))
"""What joins a token's hidden state and the next token, and the dim along which it is divided."""
_MTP_MODULE_NAME: Final = "mtp"
_QWEN_MODULE_NAMES: Final = {
    "enorm": f"{_MTP_MODULE_NAME}.pre_fc_norm_embedding",
    "hnorm": f"{_MTP_MODULE_NAME}.pre_fc_norm_hidden",
    "eh_proj": f"{_MTP_MODULE_NAME}.fc",
}
"""What Qwen3-Next and Qwen3.5 call these; all of their layers that predict share them, core's have each its own."""
_MTP_NON_LAYER_WEIGHTS: Final = {*(f"{name}.weight" for name, _ in _MTP_INPUT_MODULES), "shared_head.norm.weight"}
COPIES: Final = (
    ("embed_tokens.weight", "model.embed_tokens.weight"),
    ("shared_head.head.weight", "lm_head.weight"),
)
"""What DeepSeek's layer has of the model's own."""


def count_stored_layers(names: Iterable[str]) -> int:
    """Count the layers of which there are arrays of these names.

    >>> count_stored_layers(["mtp.layers.0.enorm.weight", "decoder.layers.7.pre_mlp_layernorm.weight"])
    1
    """
    return len({found[1] for name in names if (found := _MTP_LAYER_PATTERN.fullmatch(name)) is not None})


def count_complete_layers(order: PackRequest) -> int:
    """Count those that a request has whole, copies of the embedding and the head aside; others are left behind.

    Megatron-LM builds them as the last layer is: one with experts behind a dense layer has no place.
    """
    model, names, count = order.model, order.have.tensors.keys(), 0
    if is_hybrid(model):
        own = {name for name in model.tensors if name.startswith(FURTHER)}
        return int(bool(own) and names >= own and order.config.get("num_nextn_predict_layers") == 1)
    needed = (name for name, tensor in model.tensors.items() if not tensor.optional)
    last = {name.partition(f"layers.{model.layers - 1}.")[2] for name in needed}
    if f"{_QWEN_MODULE_NAMES['eh_proj']}.weight" in model.tensors:
        own = {
            name.removeprefix(f"{_MTP_MODULE_NAME}.layers.0.")
            for name in model.tensors
            if name.startswith(f"{_MTP_MODULE_NAME}.")
        }
        ends = {f"{name}.weight" for name in (*_QWEN_MODULE_NAMES.values(), f"{_MTP_MODULE_NAME}.norm")}
        return int(
            own - ends == last - {""} and all(n in names for n in model.tensors if n.startswith(f"{_MTP_MODULE_NAME}."))
        )
    while wanted := _list_layer_names(model, count):
        prefix = f"model.layers.{model.layers + count}."
        inner = {name.removeprefix(prefix) for name in wanted} - _MTP_NON_LAYER_WEIGHTS
        if not names >= set(wanted) or inner != last - {""}:
            break
        count += 1
    return count


def list_further_modules(
    parts: ModelParts, index: int, variant: LayerVariant, held: range | None = None
) -> Iterator[tuple[str, Iterator[WholeArray]]]:
    """List the modules of such a layer: what stands before the names of each one's arrays, and these.

    Of its routed experts only those that are `held`, if that is given. None, if the model has no such layer.
    """
    if f"{_QWEN_MODULE_NAMES['eh_proj']}.weight" in parts:
        if not index:
            yield from _list_joined_modules(parts, variant, held)
        return
    number = parts.model.layers + index
    first, last, ending = f"model.layers.{number}", f"model.layers.{number}", "shared_head.norm"
    hybrid = is_hybrid(parts.model)
    if hybrid:
        depth = len(format_further_letters(parts.model)) if not index else 0
        first, last, ending = f"{FURTHER}0", f"{FURTHER}{depth - 1}", "final_layernorm"
    if f"{first}.enorm.weight" not in parts or (hybrid and not depth):
        return
    yield (
        "",
        (WholeArray(f"{name}.weight", (parts[f"{first}.{name}.weight"],), dim) for name, dim in _MTP_INPUT_MODULES),
    )
    if hybrid:
        for inner in range(depth):
            yield f"{_HYBRID_LAYER_PREFIX}layers.{inner}.", list_hybrid_arrays(parts, f"{FURTHER}{inner}", held)
    else:
        yield INNER, list_layer_arrays(parts, number, variant, held)
    yield "", iter((WholeArray("final_layernorm.weight", (parts[f"{last}.{ending}.weight"],)),))


def _list_joined_modules(
    parts: ModelParts, variant: LayerVariant, held: range | None
) -> Iterator[tuple[str, Iterator[WholeArray]]]:
    """List the modules of Qwen's layer that predicts, beside which stands what joins and what ends it."""
    yield (
        "",
        (
            WholeArray(f"{name}.weight", (parts[f"{_QWEN_MODULE_NAMES[name]}.weight"],), dim)
            for name, dim in _MTP_INPUT_MODULES
        ),
    )
    yield INNER, list_layer_arrays(parts, 0, variant, held, within=_MTP_MODULE_NAME)
    yield "", iter((WholeArray("final_layernorm.weight", (parts[f"{_MTP_MODULE_NAME}.norm.weight"],)),))


def _list_layer_names(model: Model, index: int) -> list[str]:
    """List the tensors of a layer, copies aside; none if the model has no such layer as Megatron-LM's."""
    prefix = f"model.layers.{model.layers + index}."
    if f"{prefix}enorm.weight" not in model.tensors:
        return []
    copies = {prefix + own for own, _ in COPIES}
    return [name for name in model.tensors if name.startswith(prefix) and name not in copies]
