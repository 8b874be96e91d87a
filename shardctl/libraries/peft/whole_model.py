"""Tells an adapter from its base in the state dict of both, which trainers save whole.

Each matrix is called by its adapter there: `q_proj.lora_A.default.weight`, and the base's own weight beside it
`q_proj.base_layer.weight`. Which of these tensors PEFT puts into `adapter_model.safetensors`, and under which names:
PEFT 0.21 (utils/save_and_load.py, `get_peft_model_state_dict`; tuners/tuners_utils.py,
`_get_learnable_bias_state_dict`).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from shardctl.libraries.files.impostors import ADAPTER_PREFIX, LIVE_MATRIX

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_SAVED_WHOLE: Final = re.compile(r"(?P<module>.+)\.modules_to_save\.(?P<adapter>[^.]+)\.(?P<rest>.+)")
_EMBEDDING_MODULE_NAMES: Final = ("embed_tokens", "lm_head")
"""Modules whose base PEFT saves, too, if it is adapted (`EMBEDDING_LAYER_NAMES`)."""
_MAGNITUDE_SUFFIX: Final = ".lora_magnitude_vector"


def list_live_adapters(names: Iterable[str]) -> tuple[str, ...]:
    """List the adapters whose matrices are among tensors of a model in training.

    >>> list_live_adapters(["q_proj.base_layer.weight", "q_proj.lora_A.default.weight"])
    ('default',)
    >>> list_live_adapters(["base_model.model.q_proj.lora_A.weight"])  # saved by itself
    ()
    """
    matches = (LIVE_MATRIX.fullmatch(name) for name in names if ".lora_" in name)
    return tuple(dict.fromkeys(match["adapter"] for match in matches if match is not None))


def map_saved_names(names: Iterable[str], adapter: str, config: Mapping[str, object]) -> dict[str, str]:
    """Map the names of an adapter's tensors in such a state dict to those that PEFT saves it under.

    `config` is what `adapter_config.json` says.

    >>> map_saved_names(["q.base_layer.weight", "q.lora_A.default.weight"], "default", {})
    {'q.lora_A.default.weight': 'base_model.model.q.lora_A.weight'}
    """
    names = list(names)
    live = {name: match for name in names if (match := LIVE_MATRIX.fullmatch(name)) and match["adapter"] == adapter}
    modules = {match["module"] for match in live.values()}
    biases = config.get("bias", "none")
    found = {}
    for name in names:
        module, _, own = name.rpartition(".base_layer.")
        saved = _SAVED_WHOLE.fullmatch(name)
        if name in live:
            match = live[name]
            rest = "" if match["part"] == _MAGNITUDE_SUFFIX else match["rest"] or ""
            found[name] = f"{match['module']}{match['part']}{rest}"
        elif saved is not None:
            if saved["adapter"] == adapter:
                found[name] = f"{saved['module']}.{saved['rest']}"
        elif LIVE_MATRIX.fullmatch(name) is None and (
            (biases == "all" and name.endswith(".bias"))
            or (own == "bias" and module in modules and str(biases).endswith("_only"))
            or (own and module in modules and module.rpartition(".")[2] in _EMBEDDING_MODULE_NAMES)
        ):
            found[name] = name
    return {name: _prefix(saved) for name, saved in found.items()}


def _prefix(name: str) -> str:
    """Return a name with what PEFT's model puts before it, and without what a trainer puts before that."""
    return ADAPTER_PREFIX + name.rpartition(ADAPTER_PREFIX)[2]
