"""Makes a config for `consolidated.safetensors` with `params.json` alone: Mistral's own form, or Meta's names saved so.

Both call tensors alike and rotate neighbouring pairs. Mistral's `params.json` (mistralai/mistral-inference `args.py`)
always says `head_dim` and `hidden_dim`; Meta's says `multiple_of`, from which its code computes the latter.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.errors import SourceError
from shardctl.libraries.meta.params import PARAMS, read_params
from shardctl.tensors.manifest import OwnConfig

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from shardctl.libraries.meta.params import MetaParams
    from shardctl.storage import Source
    from shardctl.tensors.manifest import Tensor

_CONSOLIDATED_FILE_PATTERN: Final = re.compile(r"consolidated(-[0-9]{5}-of-[0-9]{5})?\.safetensors")
_EMBEDDING_NAME: Final = "tok_embeddings.weight"
_CONFIG_FILE: Final = "config.json"
_OF_META: Final = frozenset({"multiple_of", "ffn_dim_multiplier", "use_scaled_rope"})
_OF_MISTRAL: Final = frozenset({"head_dim", "hidden_dim"})
_KNOWN_PARAMS_KEYS: Final = _OF_MISTRAL | {
    *("dim", "n_layers", "n_heads", "n_kv_heads", "norm_eps", "vocab_size", "rope_theta", "sliding_window"),
    *("tied_embeddings", "max_seq_len", "max_position_embeddings", "max_batch_size"),
}
_EXPECTED_PARAMS_VALUES: Final[Mapping[str, tuple[object, ...]]] = {
    "model_type": ("transformer",),
    "activation": ("silu",),
    "causal": (True,),
    "use_biases": (False,),
    "dtype": ("bfloat16", "float16", "float32"),
}
"""What Mistral's later files say of every such model."""
_DEFAULT_CONTEXT_LENGTH: Final = 32_768
"""What transformers' converter takes for `max_position_embeddings` where the file says nothing."""


def read_native_config(
    source: Source, files: Collection[str], tensors: Mapping[str, Tensor]
) -> tuple[OwnConfig | None, tuple[str, ...]]:
    """Return the config of transformers that `params.json` describes, and what to warn of where it makes none.

    There is none beside a `config.json`, for files of other names, and where the file says more than a dense model of
    Llama's or Mistral's class has. Raises SourceError for a `params.json` that is malformed.
    """
    named = all(_CONSOLIDATED_FILE_PATTERN.fullmatch(path) for path in files)
    params = (
        read_params(source) if named and _EMBEDDING_NAME in tensors and _CONFIG_FILE not in source.files() else None
    )
    if params is None:
        return None, ()
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    if params.given.keys() >= _OF_MISTRAL and _OF_META.isdisjoint(params.given):
        return _build_mistral_config(params, shapes)
    config = params.config(shapes)
    return config, () if config is not None else (_describe_kept("is unlike that of Llama 2 and 3"),)


def _build_mistral_config(
    params: MetaParams, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[OwnConfig | None, tuple[str, ...]]:
    given = {key: value for key, value in params.given.items() if value is not None}
    usual = {key for key, values in _EXPECTED_PARAMS_VALUES.items() if given.get(key) in values}
    more = sorted(given.keys() - _KNOWN_PARAMS_KEYS - usual)
    if more:
        return None, (_describe_kept(f"has {', '.join(more)[:200]}, which Mistral's dense models do not have"),)
    theta, window = given.get("rope_theta"), _parse_window(given.get("sliding_window"))
    if theta is None:
        return None, (_describe_kept("has no rope_theta, and Mistral's code and transformers assume different ones"),)
    vocabulary = shapes[_EMBEDDING_NAME][0]
    if params.vocabulary not in (None, vocabulary):
        raise SourceError(
            f"{PARAMS} has vocab_size {params.vocabulary:,}, but {_EMBEDDING_NAME} has {vocabulary:,} rows",
            hint=f"{PARAMS} may belong to another model",
        )
    stated = given.get("max_position_embeddings", given.get("max_seq_len"))
    warning = f"config.json is made from Mistral's {PARAMS}"
    if stated is None:
        warning += (
            f", which does not say max_position_embeddings; {_DEFAULT_CONTEXT_LENGTH:,} is taken (--config gives"
            " another)"
        )
    config: dict[str, object] = {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_act": "silu",
        "hidden_size": params.dim,
        "num_hidden_layers": params.layers,
        "num_attention_heads": params.heads,
        "num_key_value_heads": params.kv_heads,
        "head_dim": params.head,
        "intermediate_size": given["hidden_dim"],
        "vocab_size": vocabulary,
        "rms_norm_eps": given.get("norm_eps", 1e-5),
        "max_position_embeddings": stated or _DEFAULT_CONTEXT_LENGTH,
        "rope_theta": theta,
        "sliding_window": window,
        "tie_word_embeddings": bool(given.get("tied_embeddings", "output.weight" not in shapes)),
    }
    assumed = frozenset({"max_position_embeddings"} if stated is None else ())
    return OwnConfig(config, (warning,), assumed), ()


def _parse_window(value: Any) -> int | None:  # noqa: ANN401 - what JSON holds
    """Return the window, which some files hold as text; raises SourceError for anything but a number."""
    if value is None:
        return None
    if isinstance(value, str) and value.isdecimal():
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    raise SourceError(
        f"{PARAMS} has sliding_window {ascii(value)[:60]}, which is not one number for all layers",
        hint="give the config.json of transformers with --config PATH",
    )


def _describe_kept(why: str) -> str:
    return f"{PARAMS} {why}: without --config, names and the order of rows stay as they are"
