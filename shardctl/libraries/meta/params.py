"""Converts Meta's `params.json` of a Llama to the `config.json` of transformers.

The fields are those of `ModelArgs` (meta-llama/llama `model.py`, meta-llama/llama-models `models/llama3/args.py`); what
they mean for transformers is in its `models/llama/convert_llama_weights_to_hf.py`.
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.errors import SourceError
from shardctl.base.value import value_class
from shardctl.models.tables.rope import parse_rope
from shardctl.storage.bounded_text import CONFIG_TEXT, read_json
from shardctl.tensors.manifest import LibrarySettings, OwnConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.models import Model
    from shardctl.storage import Source

PARAMS: Final = "params.json"
_TOO_LARGE: Final = 1e30
"""Beyond any field that may be a fraction, and far from what no float can hold."""
_TOO_MANY: Final = 1 << 31
_KNOWN_PARAMS_KEYS: Final = frozenset(
    {
        *("dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "hidden_dim", "vocab_size", "multiple_of"),
        *("ffn_dim_multiplier", "norm_eps", "rope_theta", "use_scaled_rope", "rope_scaling_factor"),
        *("max_seq_len", "max_batch_size"),
    }
)
"""Fields that a config can say; `max_seq_len` and `max_batch_size` are limits of a run."""
_UNCOMPARED_PARAMS_KEYS: Final = frozenset({"vocab_size", "multiple_of", "ffn_dim_multiplier", "ffn_exp"})
"""Fields that say in several ways what the shapes of tensors say, too."""
_PARAMS_DEFAULTS: Final = {"norm_eps": 1e-5, "rope_theta": 10_000.0, "use_scaled_rope": False}
"""What the code takes for fields that are absent."""
_LLAMA3_VOCABULARY: Final = 128_256
LLAMA3_THETA: Final = 500_000


@value_class
class MetaParams:
    """The fields that decide how tensors are cut and what the model is."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    """Elements of a head."""
    vocabulary: int | None
    """None if the file leaves that to the tokenizer (-1, or no such field)."""
    given: Mapping[str, Any] = field(default_factory=dict)
    """All that the file says."""

    def config(self, shapes: Mapping[str, tuple[int, ...]]) -> OwnConfig | None:
        """Return the config of transformers' `LlamaForCausalLM`; None if the file says more than such a config can.

        `shapes` are those of the tensors, by Meta's names.
        """
        if not self.given.keys() <= _KNOWN_PARAMS_KEYS:
            return None
        theta, scaled = self.given.get("rope_theta") or 10_000.0, bool(self.given.get("use_scaled_rope"))
        vocabulary = shapes["tok_embeddings.weight"][0]
        version, context = _guess_llama_version(vocabulary, theta, scaled=scaled)
        config: dict[str, object] = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": self.dim,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head,
            "intermediate_size": self._compute_ffn_size(shapes),
            "vocab_size": vocabulary,
            "rms_norm_eps": self.given.get("norm_eps") or 1e-5,
            "max_position_embeddings": context,
            "rope_theta": theta,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": "output.weight" not in shapes,
        }
        said, assumed = f"max_position_embeddings {context:,}", {"max_position_embeddings"}
        if scaled:
            # Llama 3.2, whose models of text have at most 3,072, scales by 32; its file does not say so
            factor = self.given.get("rope_scaling_factor") or (32.0 if self.dim < 4_096 else 8.0)  # noqa: PLR2004
            config["rope_scaling"] = {
                "rope_type": "llama3",
                "factor": float(factor),
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8_192,
            }
            if "rope_scaling_factor" not in self.given:
                said += f" and rope_scaling's factor {factor:g}"
                assumed.add("rope_parameters.factor")
        if vocabulary == _LLAMA3_VOCABULARY:
            config |= {"bos_token_id": 128_000, "eos_token_id": 128_001}
            said += " and bos_token_id 128,000"
            assumed |= {"bos_token_id", "eos_token_id"}
        warning = (
            f"config.json is made from {PARAMS}, which does not say {said}; the values of {version} are "
            "taken (--config gives others)"
        )
        return OwnConfig(config, (warning,), frozenset(assumed))

    def _compute_ffn_size(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """Return inner elements of the MLP, by the tensors, else by the rule of `FeedForward`."""
        stored = shapes.get("layers.0.feed_forward.w1.weight")
        if stored is not None:
            return stored[0]
        multiple = self.given.get("multiple_of") or 256
        hidden = int((self.given.get("ffn_dim_multiplier") or 1) * int(8 * self.dim / 3))
        return int(self.given.get("hidden_dim") or -(-hidden // multiple) * multiple)


def _guess_llama_version(vocabulary: int, theta: float, *, scaled: bool) -> tuple[str, int]:
    """Return which Llama this seems to be, and the longest context it was trained for."""
    if scaled:
        return "Llama 3.1", 131_072
    if vocabulary == _LLAMA3_VOCABULARY or theta == LLAMA3_THETA:
        return "Llama 3", 8_192
    if theta > 10_000:  # noqa: PLR2004 - the theta of all before
        return "Code Llama", 16_384
    return "Llama 2", 4_096


def build_library_settings(params: MetaParams | None) -> LibrarySettings | None:
    """Build the settings that are compared with a config or with another `params.json`; None if there is no file."""
    if params is None:
        return None
    said = {key: value for key, value in params.given.items() if key not in _UNCOMPARED_PARAMS_KEYS}
    return LibrarySettings(PARAMS, {**_PARAMS_DEFAULTS, "n_kv_heads": params.kv_heads, **said}, _expect_params)


def _expect_params(config: Mapping[str, Any], model: Model) -> Mapping[str, object]:
    """Return the fields that follow from a config of Llama 1 to 3, but for those that say the same in several ways."""
    if model.family != "llama":
        return {}
    said, heads = parse_rope(config), config["num_attention_heads"]
    q, k = (model.tensors[f"model.layers.0.self_attn.{part}_proj.weight"].shape for part in ("q", "k"))
    return {
        "dim": q[1],
        "n_layers": model.layers,
        "n_heads": heads,
        "n_kv_heads": k[0] * heads // q[0],
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "rope_theta": said.theta,
        "use_scaled_rope": said.as_llama3,
    }


def read_params(source: Source) -> MetaParams | None:
    """Read what `params.json` says; None if there is none.

    Raises SourceError if it is malformed, or numbers are missing or not positive.
    """
    if PARAMS not in source.files():
        return None
    given = read_json(source, PARAMS, CONFIG_TEXT)
    if isinstance(given, dict) and isinstance(given.get("model"), dict):
        given = given["model"]  # what a run was started with, around the model's own
    if not isinstance(given, dict):
        raise SourceError(f"{PARAMS} is not a JSON object")
    dim, layers, heads = (_parse_count(given, name) for name in ("dim", "n_layers", "n_heads"))
    kv_heads = _parse_count(given, "n_kv_heads") if given.get("n_kv_heads") is not None else heads
    if given.get("head_dim") is None and dim % heads:
        raise SourceError(f"{PARAMS} has {heads} heads, which do not divide dim {dim}")
    head = _parse_count(given, "head_dim") if given.get("head_dim") is not None else dim // heads
    for name in ("rope_theta", "norm_eps", "ffn_dim_multiplier", "multiple_of", "hidden_dim", "rope_scaling_factor"):
        parse_number(given, name)
    vocabulary = given.get("vocab_size")
    known = isinstance(vocabulary, int) and not isinstance(vocabulary, bool) and vocabulary > 0
    return MetaParams(dim, layers, heads, kv_heads, head, vocabulary if known else None, given)


def parse_number(given: Mapping[str, Any], name: str, default: float = 1) -> float:
    """Parse a positive number, or return the default where there is none; raises SourceError for anything else."""
    value = given.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _TOO_LARGE:
        raise SourceError(f"{PARAMS} has {name} {ascii(value)[:40]}, which is not a positive number")
    return value


def _parse_count(given: Mapping[str, Any], name: str) -> int:
    value = given.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < _TOO_MANY:
        raise SourceError(f"{PARAMS} has {name} {ascii(value)[:40]}, which is not a positive number")
    return value
