"""Makes the config of an adapter from what verl notes of it beside the model: its rank, alpha and task.

verl 0.9 writes `lora_train_meta.json` (`utils/checkpoint/fsdp_checkpoint_manager.py`) and no `adapter_config.json`; its
own merger makes that of the note and of the names of tensors (`model_merger/base_model_merger.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError
from shardctl.libraries.files.impostors import LIVE_MATRIX

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardctl.tensors.manifest import Tensor

TRAINER_METADATA: Final = "lora_train_meta.json"
_MAGNITUDE_SUFFIX: Final = "magnitude_vector"
_ADAPTER_CONFIG_HINT: Final = "put the adapter_config.json into the directory"


def build_adapter_config(note: object, tensors: Mapping[str, Tensor], adapter: str) -> dict[str, object]:
    """Build what PEFT reads; raises SourceError for a note that is none, or that the matrices contradict."""
    if not isinstance(note, dict) or not all(_is_positive(note.get(key)) for key in ("r", "lora_alpha")):
        raise SourceError(
            f"{TRAINER_METADATA} does not say the rank and alpha of the adapter",
            hint=_ADAPTER_CONFIG_HINT,
        )
    modules = dict.fromkeys(_list_modules(tensors, adapter, note["r"]))
    return {
        "base_model_name_or_path": None,
        "bias": "none",
        "inference_mode": True,
        "lora_alpha": note["lora_alpha"],
        "peft_type": "LORA",
        "r": note["r"],
        "target_modules": _shorten_names(modules, tensors),
        "task_type": note.get("task_type"),
    }


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _list_modules(tensors: Mapping[str, Tensor], adapter: str, rank: int) -> Iterator[str]:
    """List the modules that an adapter changes, as its base calls them."""
    for name, tensor in tensors.items():
        match = LIVE_MATRIX.fullmatch(name)
        if match is None or match["adapter"] != adapter:
            continue
        if match["part"].endswith(_MAGNITUDE_SUFFIX):
            raise SourceError(f"{name} is DoRA's, of which {TRAINER_METADATA} says nothing", hint=_ADAPTER_CONFIG_HINT)
        if match["part"] == ".lora_A" and tensor.shape[0] != rank:
            raise SourceError(f"{name} has {tensor.shape[0]} rows, but {TRAINER_METADATA} says a rank of {rank}")
        yield match["module"].rpartition("base_model.model.")[2]


def _shorten_names(modules: Mapping[str, None], tensors: Mapping[str, Tensor]) -> list[str]:
    """Shorten names to their last words, which PEFT looks for, unless other modules end with one of those, too."""
    last = dict.fromkeys(module.rpartition(".")[2] for module in modules)
    others = {name.rpartition(".")[0].rpartition("base_model.model.")[2] for name in tensors} - modules.keys()
    return list(modules if any(other.rpartition(".")[2] in last for other in others) else last)
