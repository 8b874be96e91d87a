"""Reads what `adapter_config.json` says of an adapter: its rank, its scaling, and what it cannot be merged with.

Sources: PEFT 0.18 to 0.21 (tuners/lora/config.py; tuners/lora/model.py, `_create_and_replace`; utils/other.py,
`get_pattern_key`).
"""

from __future__ import annotations

import math
import re
import sys
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.base.value import value_class
from shardctl.libraries.files.impostors import ADAPTER_CONFIG
from shardctl.libraries.peft.target_modules import parse_target_modules, read_names
from shardctl.models.quantization.expressions import compile_expression
from shardctl.models.tables.config import ModelConfig

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardctl.libraries.peft.target_modules import TargetModules
    from shardctl.models.quantization.expressions import ModuleExpression

_UNSUPPORTED_SETTINGS: Final = {
    "alora_invocation_tokens": "it acts on some tokens only (aLoRA)",
    "arrow_config": "it chooses between adapters for each token (Arrow)",
    "layer_replication": "it repeats layers of the base",
    "megatron_config": "it was trained on layers of Megatron-LM",
    "use_bdlora": "its matrices are block-diagonal (BD-LoRA)",
    "use_qalora": "its inputs are pooled (QA-LoRA)",
    "kasa_config": "it is a KaSA adapter",
    "monteclora_config": "it is a MonteCLoRA adapter",
    "velora_config": "it is a VeLoRA adapter",
}
"""Settings of which a value that is not empty means that the merge is another one, or none."""
_BASE_MODIFYING_INITS: Final = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of `init_lora_weights` that change the base, too, when the adapter is made and each time it is loaded."""
_VERSION_PART: Final = re.compile(r"[0-9]{1,9}")
_MAX_SCALING: Final = (2 - 2.0**-23) * 2.0**127
"""The largest number of F32, in which PEFT multiplies."""


@value_class
class AdapterSettings:
    """What a merge needs to know."""

    base: str
    """Where the base was when the adapter was trained; empty if that is not said."""
    kind: str
    """What people call it: `LoRA`, `rsLoRA`, `DoRA`."""
    rank: int
    alpha: float
    stabilised: bool
    """Whether the scaling divides by the root of the rank (rsLoRA)."""
    dora: bool
    biased: bool
    """Whether each product has a bias (`lora_bias`)."""
    transposed: bool
    """Whether weights are `[in, out]` (`fan_in_fan_out`)."""
    targets: tuple[str, ...]
    """The modules and parameters that it says that it changes, as names or endings of names."""
    parameters: tuple[str, ...]
    """Those of them that are parameters, such as all experts of a layer."""
    modules: TargetModules
    """Which modules of a base they are."""
    version: tuple[int, ...]
    """Of PEFT, of which 0.18 and later say theirs; empty otherwise."""
    tokens: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """The rows that it replaces of tables of tokens, by the end of the module's name (`trainable_token_indices`)."""
    tied: bool = False
    """Whether it keeps the head tied to an embedding that was trained whole (`ensure_weight_tying`)."""
    ranks: tuple[tuple[ModuleExpression, int], ...] = ()
    alphas: tuple[tuple[ModuleExpression, float], ...] = ()
    """Ranks and alphas of their own of modules whose names match."""

    def find_rank(self, module: str) -> int:
        """Find the rank that a module should have."""
        return next((rank for expression, rank in self.ranks if expression.matches(module)), self.rank)

    def compute_scaling(self, module: str, rank: int) -> float:
        """Compute what the product of a module's matrices is multiplied with; raises SourceError beyond F32."""
        alpha = next((alpha for expression, alpha in self.alphas if expression.matches(module)), self.alpha)
        scaling = alpha / math.sqrt(rank) if self.stabilised else alpha / rank
        if abs(scaling) > _MAX_SCALING:
            raise SourceError(
                f"{ADAPTER_CONFIG} has an alpha of {alpha:g} (lora_alpha or alpha_pattern) for {module} of rank "
                f"{rank}, which makes a scaling that F32 does not hold",
                hint="the config may be damaged: alpha is usually the rank or twice the rank",
            )
        return scaling


def parse_settings(values: Mapping[str, Any], *, merged: bool = True) -> AdapterSettings:
    """Parse the content of `adapter_config.json`.

    Raises UnsupportedError for an adapter that is no product of two matrices, and for one that is to be `merged` and
    cannot be; SourceError for settings that make no sense.
    """
    kind = values.get("peft_type")
    if kind != "LORA":
        raise UnsupportedError(
            f"{ADAPTER_CONFIG} says {kind!r:.50}, but shardctl only knows adapters of the type LORA",
            hint="merge it with PEFT (`merge_and_unload`) and give the merged model",
        )
    if merged:
        _check_mergeable(values)
    config = ModelConfig(values, ADAPTER_CONFIG)
    dora, stabilised = (config.read_flag(key, default=False) for key in ("use_dora", "use_rslora"))
    parameters = read_names(values, "target_parameters")
    return AdapterSettings(
        base=config.text("base_model_name_or_path", ""),
        kind=" with ".join(filter(None, ("DoRA" if dora else "", "rsLoRA" if stabilised else ""))) or "LoRA",
        rank=config.size("r"),
        alpha=_read_number(values.get("lora_alpha", 8), "lora_alpha"),
        stabilised=stabilised,
        dora=dora,
        biased=config.read_flag("lora_bias", default=False),
        transposed=config.read_flag("fan_in_fan_out", default=False),
        targets=(*read_names(values, "target_modules"), *parameters),
        modules=parse_target_modules(values),
        parameters=parameters,
        version=tuple(
            int(part) for part in str(values.get("peft_version") or "").split(".")[:2] if _VERSION_PART.fullmatch(part)
        ),
        tokens=tuple(_read_tokens(values)),
        tied=config.read_flag("ensure_weight_tying", default=False),
        ranks=tuple((expression, int(value)) for expression, value in _read_pattern(values, "rank_pattern")),
        alphas=tuple(_read_pattern(values, "alpha_pattern")),
    )


def _check_mergeable(values: Mapping[str, Any]) -> None:
    for key, meaning in _UNSUPPORTED_SETTINGS.items():
        if values.get(key):
            raise UnsupportedError(f"the adapter cannot be merged: {meaning} ({key} in {ADAPTER_CONFIG})")
    start = values.get("init_lora_weights")
    if isinstance(start, str) and start.startswith(_BASE_MODIFYING_INITS):
        raise UnsupportedError(
            f"the training of this adapter changed the base, too (init_lora_weights is {start!r:.50})",
            hint="save it with PEFT's path_initial_model_for_weight_conversion, which makes it an adapter of the base",
        )


def _read_pattern(values: Mapping[str, Any], key: str) -> list[tuple[ModuleExpression, float]]:
    found = values.get(key) or {}
    if not isinstance(found, dict):
        raise SourceError(f"{ADAPTER_CONFIG} has {key} = {found!r:.100} where a table is expected")
    return [
        (compile_expression(rf"(.*\.)?({entry})$", ADAPTER_CONFIG, entry), _read_number(value, f"{key} of {entry}"))
        for entry, value in found.items()
    ]


def _read_tokens(values: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Read which rows an adapter replaces: a list is of the embedding."""
    found = values.get("trainable_token_indices") or {}
    if not isinstance(found, list | dict):
        raise SourceError(f"{ADAPTER_CONFIG} has trainable_token_indices = {found!r:.100} where rows are expected")
    for name, rows in ({"": found} if isinstance(found, list) else found).items():
        if not isinstance(rows, list) or not all(type(row) is int and row >= 0 for row in rows):
            raise SourceError(f"{ADAPTER_CONFIG} has trainable_token_indices = {found!r:.100} where rows are expected")
        if len({*rows}) != len(rows):
            raise SourceError(f"{ADAPTER_CONFIG} names a row twice in trainable_token_indices")
        yield name, tuple(rows)


def _read_number(value: object, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise SourceError(f"{ADAPTER_CONFIG} has {what} = {value!r:.50} where a number is expected")
    return value
