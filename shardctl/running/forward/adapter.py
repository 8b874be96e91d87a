"""Wraps what is used of transformers: classes, models without weights, and renaming of stored tensors.

The conversion is semi-private (transformers 5.17 to 5.23, `transformers/core_model_loading.py` and
`transformers/conversion_mapping.py`): where a version lacks it, names are taken as they are, and that is said.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from shardctl.base.errors import UnsupportedError
from shardctl.base.value import state_class, value_class
from shardctl.running.forward.inputs import SEED
from shardctl.running.machine_failure import raise_machine_error, raise_machine_text
from shardctl.verify.transformers_classes import build_config, silence_transformers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from shardctl.running.forward.skeleton import TensorSlot

Torch = Any
"""Modules, tensors and classes of torch and transformers, which have no types worth checking here."""


def build_bare_model(kind: Torch, config: Mapping[str, Any], dtype: Torch) -> Torch:
    """Build a model of class `kind` whose parameters have no memory; its buffers are real, as rotary tables must be.

    Attention and experts use the plain implementations: the same kernels whatever the shapes, and experts one by one.
    Raises UnsupportedError for a config of which its class makes no model.
    """
    import torch

    usual = torch.get_default_dtype()
    with silence_transformers(), _use_meta_parameters():
        torch.set_default_dtype(dtype)  # never model.to(dtype): it would round the rotary tables too
        try:
            model = kind._from_config(build_config(kind, config, dtype), dtype=dtype, **_choose_eager_settings(kind))  # noqa: SLF001 - the only way in
        except Exception as error:
            raise_machine_error(error)
            said = " ".join(str(error).split())
            raise UnsupportedError(f"{kind.__name__} cannot be built from the config: {said:.300}") from error
        finally:
            torch.set_default_dtype(usual)
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "use_cache"):
            module.config.use_cache = False  # parts that run twice would fill a cache twice
    return model.eval()


def _choose_eager_settings(kind: Torch) -> dict[str, str]:
    chosen = {"attn_implementation": "eager"}
    can_choose = getattr(kind, "_can_set_experts_implementation", None)
    if can_choose is not None and can_choose():
        chosen["experts_implementation"] = "eager"
    return chosen


@contextmanager
def _use_meta_parameters() -> Iterator[None]:
    """Put every parameter on the meta device as soon as a module has it, before it is given values."""
    from torch import nn

    usual = nn.Module.register_parameter

    def register(module: Torch, name: str, parameter: Torch) -> None:
        usual(module, name, parameter)
        if parameter is not None and parameter.device.type != "meta":
            kind = type(parameter)
            empty = kind(parameter.to("meta"), requires_grad=False)
            # transformers draws no values for what is flagged so; buffers have no flag and get theirs.
            empty._is_hf_initialized = True  # noqa: SLF001
            module._parameters[name] = empty  # noqa: SLF001

    nn.Module.register_parameter = register  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = usual  # type: ignore[method-assign]


def set_start_values(model: Torch, slots: Sequence[TensorSlot]) -> None:
    """Give slots for which there is nothing stored the values of a new model, for good."""
    import torch

    torch.manual_seed(SEED)
    for slot in slots:
        slot.put(torch.empty(slot.shape, dtype=slot.empty.dtype, device=slot.empty.device))
    own = {(id(slot.module), slot.attribute) for slot in slots}
    with torch.no_grad():
        for module in dict.fromkeys(slot.module for slot in slots):
            held = module._parameters  # noqa: SLF001 - those that stand for what is not read yet cannot be written to
            rest = {name: p for name, p in held.items() if p is not None and (id(module), name) not in own}
            held |= {name: torch.nn.Parameter(torch.empty_like(p.contiguous())) for name, p in rest.items()}
            model._init_weights(module)  # noqa: SLF001 - what from_pretrained does
            held |= rest
    for slot in slots:
        slot.empty = getattr(slot.module, slot.attribute)


@value_class
class ConversionTarget:
    """Where a stored tensor belongs in the model."""

    name: str
    """A name of the state dict; the first of several, if the tensor is taken apart or joined with others."""
    converted: bool
    """Whether values change place on the way, not only names."""
    besides: tuple[str, ...] = ()
    """The other names, if the tensor is taken apart."""


@state_class
class WeightConversion:
    """How transformers reads stored names into one model."""

    model: Torch
    problem: str = ""
    """Why names are taken as they are, if they are."""

    def targets(self, names: Iterable[str]) -> dict[str, ConversionTarget]:
        """Return where each stored name belongs; names that the model has no use for are left out."""
        state = self.model.state_dict(keep_vars=True)
        try:
            return self._map_stored_names(names, state)
        except (ImportError, AttributeError, TypeError) as error:
            self.problem = f"this transformers does not rename stored tensors as expected ({error})"
            return {name: ConversionTarget(name, converted=False) for name in names if name in state}

    def _map_stored_names(self, names: Iterable[str], state: dict[str, Torch]) -> dict[str, ConversionTarget]:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        mapping = get_model_conversion_mapping(self.model)
        renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
        converters = [each for each in mapping if isinstance(each, WeightConverter)]
        prefix, found = self.model.base_model_prefix, {}
        for name in names:
            target, pattern = rename_source_key(name, renamings, converters, prefix, state)
            if target not in state and name in state:
                target, pattern = rename_source_key(name, [], [], prefix, state)
            if target in state:
                parts: list[str] = next((c.target_patterns for c in converters if pattern in c.source_patterns), [])
                besides = tuple(target.replace(parts[0], part) for part in parts[1:] if parts[0] in target)
                found[name] = ConversionTarget(target, pattern is not None, tuple(n for n in besides if n in state))
        return found

    def fill(self, tensors: Mapping[str, object], device: str, dtype: Torch) -> None:
        """Read stored `tensors`, all that a part of the model needs, and set what they make in the model."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        mapping: Torch = get_model_conversion_mapping(self.model)
        how = LoadStateDictConfig(device_map={"": device}, dtype=dtype, weight_mapping=mapping)
        with silence_transformers():
            told, _ = convert_and_load_state_dict_in_model(self.model, dict(tensors), how)
        if told.conversion_errors or told.mismatched_keys:
            wrong = [*map(str, told.conversion_errors.values()), *map(str, told.mismatched_keys)]
            raise_machine_text(wrong[0], device)
            raise UnsupportedError(f"transformers cannot read {next(iter(tensors))}: {wrong[0]}")
