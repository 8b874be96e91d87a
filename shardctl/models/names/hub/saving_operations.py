"""Does to described arrays what transformers' operations do to real ones when a model is saved.

Each function takes the arrays by the pattern that they matched, and returns arrays by the pattern of their new name, as
the classes of the same name do (transformers, core_model_loading.py).
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.errors import UnsupportedError
from shardctl.base.value import value_class
from shardctl.models.names.hub.composed_array import (
    HubArray,
    add_first_dim,
    flatten_first,
    interleave,
    join,
    pad_end,
    split_evenly,
    transpose,
    unstack,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

PADDING: Final = "Inkling2UnpadVocab"
"""The operation that adds rows of zeros, which `pad_saved_tensors` has done before."""
_HEAD_COUNT_KEYS: Final = ("num_attention_heads", "num_heads", "n_heads", "vt_num_attention_heads")
"""Keys for the number of heads, as configs of transformers and of the Hub have it."""


@value_class
class OperationContext:
    """What operations know besides the arrays."""

    sources: tuple[str, ...]
    """The patterns of the arrays."""
    targets: tuple[str, ...]
    """The patterns of the new names."""
    config: Mapping[str, Any]

    @property
    def target(self) -> str:
        """The pattern of the only new name."""
        if len(self.targets) > 1:
            raise UnsupportedError(f"cannot tell which of {', '.join(self.targets)} an array becomes")
        return self.targets[0]

    def find_size(self, settings: Mapping[str, Any], keys: Sequence[str]) -> int:
        """Find a number of the config of the part that `settings` name; raises UnsupportedError if it has none."""
        config = self.config.get(settings.get("subconfig_key", ""), self.config)
        found = next((config[key] for key in keys if isinstance(config.get(key), int)), None)
        if found is None or found < 1:
            raise UnsupportedError(f"config.json does not say {keys[0]}, which the order of rows on the Hub depends on")
        return int(found)


_Arrays = dict[str, list[HubArray]]


def apply_operation(name: str, settings: Mapping[str, Any], arrays: _Arrays, context: OperationContext) -> _Arrays:
    """Apply an operation of the table; raises UnsupportedError where transformers would fail, too."""
    return _OPERATIONS_BY_NAME[name](settings, arrays, context)


def _chunk(settings: Mapping[str, Any], arrays: _Arrays, context: OperationContext) -> _Arrays:
    targets = context.targets
    if "num_shards_attribute" in settings:
        text = context.config.get("text_config", context.config)
        count = text.get(settings["num_shards_attribute"])
        if not isinstance(count, int) or count < 1:
            raise UnsupportedError(f"config.json does not say {settings['num_shards_attribute']}")
        targets = tuple(context.target.replace("*", str(number)) for number in range(count))
    parts = split_evenly(_take_only(arrays), settings.get("dim", 0), len(targets))
    return {target: [part] for target, part in zip(targets, parts, strict=False)}


def _concatenate(settings: Mapping[str, Any], arrays: _Arrays, context: OperationContext) -> _Arrays:
    found = list(chain.from_iterable(arrays[source] for source in context.sources if source in arrays))
    return {context.target: [join(found, settings.get("dim", 0))]}


def _split_module_list(settings: Mapping[str, Any], arrays: _Arrays, context: OperationContext) -> _Arrays:
    found: _Arrays = {}
    for source, (array, *_) in arrays.items():
        pattern = context.target if len(arrays) == 1 else source
        for number, each in enumerate(unstack(array, settings.get("dim", 0))):
            found[pattern.replace("*", str(number))] = [each]
    return found


def _transpose(settings: Mapping[str, Any], arrays: _Arrays, context: OperationContext) -> _Arrays:
    pattern = context.sources[0] if len(context.targets) > 1 else context.targets[0]
    array = _take_only(arrays)
    if settings.get(CHECK_DIMS):  # which transposes only what does not fit the class: what is saved does
        return {pattern: [array]}
    return {pattern: [transpose(array, settings.get("dim0", 0), settings.get("dim1", 1))]}


def _interleave(settings: Mapping[str, Any], arrays: _Arrays, context: OperationContext) -> _Arrays:
    array, dim = _take_only(arrays), settings.get("dim", 0)
    runs = 2 if settings.get("inverse") else array.shape[dim] // 2
    return {context.targets[0]: [interleave(array, dim, 1, runs)]}


def _permute_for_rope(settings: Mapping[str, Any], arrays: _Arrays, context: OperationContext) -> _Arrays:
    found: _Arrays = {}
    names = settings.get("permute_layer_names")
    chained = (len(context.targets) > 1) != (len(context.sources) > 1)
    for source, (array, *_) in arrays.items():
        target = source if chained else context.target
        if names is None or any(name in source for name in names):
            heads = context.find_size(settings, _HEAD_COUNT_KEYS)
            runs = 2 if settings.get("inverse") else array.shape[0] // heads // 2
            array = interleave(array, 0, heads, runs)  # noqa: PLW2901 - the same rows in another order
        found[target] = [array]
    return found


def _split_text_and_vision_experts(settings: Mapping[str, Any], arrays: _Arrays, context: OperationContext) -> _Arrays:
    count, dim = len(context.targets), settings.get("concat_dim", 1)
    divided = [split_evenly(arrays[source][0], dim, count) for source in context.sources]
    found: _Arrays = {}
    for position, target in enumerate(context.targets):
        experts = chain.from_iterable(unstack(parts[position], settings.get("stack_dim", 0)) for parts in divided)
        found |= {target.replace("*", str(number)): [each] for number, each in enumerate(experts)}
    return found


def _pad_vocabulary(_: Mapping[str, Any], arrays: _Arrays, context: OperationContext) -> _Arrays:
    text = context.config.get("text_config", context.config)
    array = _take_only(arrays)
    size = OperationContext((), (), text).find_size({}, ("vocab_size",))
    return {context.targets[0]: [pad_end(array, 0, max(size, array.shape[0]))]}


def _split_message_queries(_: Mapping[str, Any], arrays: _Arrays, context: OperationContext) -> _Arrays:
    array = _take_only(arrays)  # of each layer a query, a key, a value and an MLP row
    rows = unstack(flatten_first(array), 0)
    chosen = ([0, 3], [1, 2])
    found: _Arrays = {}
    for target, kinds in zip(context.targets, chosen, strict=True):
        kept = [add_first_dim(row) for number, row in enumerate(rows) if number % array.shape[1] in kinds]
        found[target] = [join(kept, 0)]
    return found


def _keep(_: Mapping[str, Any], arrays: _Arrays, context: OperationContext) -> _Arrays:
    return {context.targets[0]: [_take_only(arrays)]}


def _take_only(arrays: _Arrays) -> HubArray:
    (found, *_), *others = arrays.values()
    if others:
        raise UnsupportedError(f"cannot convert {', '.join(arrays)} as one array")
    return found


_OPERATIONS_BY_NAME: Final[Mapping[str, Callable[[Mapping[str, Any], _Arrays, OperationContext], _Arrays]]] = {
    "Chunk": _chunk,
    "Concatenate": _concatenate,
    "SplitModulelist": _split_module_list,
    "Transpose": _transpose,
    "Interleave": _interleave,
    "PermuteForRope": _permute_for_rope,
    "ErnieSplitAndDecoupleTextVisionExperts": _split_text_and_vision_experts,
    PADDING: _pad_vocabulary,
    "Inkling2LoopMergeMessageQueries": _split_message_queries,
    "Inkling2LoopDequantizeExperts": _keep,  # which quantizes nothing when it saves
}
OPERATIONS: Final = frozenset(_OPERATIONS_BY_NAME)
"""The operations of the table that are known."""
CHECK_DIMS: Final = "check_dims"
"""The setting of `Transpose` by which it leaves an array alone that has the shape of the class's."""
UNSTACKING: Final = frozenset({"SplitModulelist", "ErnieSplitAndDecoupleTextVisionExperts"})
"""Those that give each expert arrays of its own."""
