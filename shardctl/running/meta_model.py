"""Lists the tensors of a model that only a config describes: the process that `checkpoint/config_only.py` starts.

The class of an installed transformers is built on the meta device, which takes no memory for weights. Tensors have the
names that `save_pretrained` would give them. Only transformers' own classes are used, never code of a checkpoint.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.dtype import BY_TORCH
from shardctl.base.errors import ShardctlError
from shardctl.base.limited_child import REQUEST_FILE, write_child_result
from shardctl.verify.transformers_classes import build_config, get_model_class, list_versions

if TYPE_CHECKING:
    from collections.abc import Mapping

Torch = Any

_IMPLEMENTATION_KEYS: Final = ("attn_implementation", "experts_implementation")
"""Ends of keys that name kernels, some of which are code from the Hub."""


def list_class_tensors(request: Mapping[str, Any]) -> dict[str, Any]:
    """List name, type, shape and further names of each tensor of a class with a config; raises what the class does."""
    import torch
    from transformers.core_model_loading import revert_weight_conversion

    kind = get_model_class(request["class"])
    dtype = getattr(torch, request["dtype"])
    config = build_config(kind, _drop_kernels(request["config"]), dtype)
    with torch.device("meta"):
        model = kind._from_config(config, dtype=dtype)  # noqa: SLF001 - what AutoModel.from_config calls
    ties: dict[str, list[str]] = {}
    for name, owner in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        ties.setdefault(owner, []).append(name)
    tied = {name for names in ties.values() for name in names}
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    return {
        "tensors": [
            [name, BY_TORCH[str(each.dtype).removeprefix("torch.")].name, list(each.shape), sorted(ties.get(name, ()))]
            for name, each in revert_weight_conversion(model, state).items()
        ],
        **list_versions(),
    }


def _drop_kernels(value: Torch) -> Torch:
    """Return a config without the names of kernels, in the configs inside, too."""
    if isinstance(value, dict):
        return {key: _drop_kernels(each) for key, each in value.items() if not key.endswith(_IMPLEMENTATION_KEYS)}
    return [_drop_kernels(each) for each in value] if isinstance(value, list) else value


def answer_request(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors of the class that is asked for, or the problem with it."""
    try:
        return list_class_tensors(request)
    except ShardctlError as error:
        return {"problem": error.message}
    except Exception as error:  # noqa: BLE001 - whatever a class raises that does not like its config
        said = " ".join(str(error).split())
        return {"problem": f"{request['class']} cannot be built of this config: {said:.200}"}


def main() -> None:
    """Answer the request in a folder."""
    folder = Path(sys.argv[1])
    request = json.loads((folder / REQUEST_FILE).read_text(encoding="utf-8"))
    write_child_result(folder, answer_request(request))


if __name__ == "__main__":
    main()
