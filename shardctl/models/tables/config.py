"""Reads the numbers and switches of a `config.json`, and says which key is wrong when one is."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeGuard

from shardctl.base.dtype import BY_NAME, BY_TORCH
from shardctl.base.errors import SourceError
from shardctl.base.value import value_class

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.base.dtype import DType

_CONFIG_INTEGER_LIMIT: Final = 1 << 40
"""No dim or count is this large; a config that says so is damaged or hostile."""
_MOST_LAYERS: Final = 500_000
"""Each has a tensor at least, and of more `models.table` describes none; some layers are listed before it counts."""
_LAYER_KEY_WORDS: Final = ("layer", "layers")
_DEFAULT_LABELS: Final = 2
"""What transformers assumes, and therefore leaves out (`configuration_utils.py`, `num_labels`)."""


def is_finite_number(value: object) -> TypeGuard[float]:
    """Return whether a value of JSON is a number that a float can hold; a whole number may be too large for one.

    >>> is_finite_number(10**400), is_finite_number(float("inf")), is_finite_number(True), is_finite_number(7)
    (False, False, False, True)
    """
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


@value_class
class ModelConfig:
    """A model's configuration; a key that is null counts as absent.

    >>> ModelConfig({"n_embd": 64, "n_inner": None}).size("n_inner", 256)
    256
    """

    values: Mapping[str, object]
    """The decoded `config.json`."""
    file: str = "config.json"
    """What messages call it."""

    def size(self, key: str, default: int | None = None) -> int:
        """Return a positive whole number; raises SourceError if it is absent without a `default`, or is none."""
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise SourceError(f"{self.file} has no {key!r}", hint="without it the model's shapes are unknown")
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < _CONFIG_INTEGER_LIMIT:
            raise SourceError(f"{self.file} has {key} = {value!r} where a positive whole number is expected")
        if value > _MOST_LAYERS and key.rpartition("_")[2] in _LAYER_KEY_WORDS:
            raise SourceError(f"{self.file} describes more than {_MOST_LAYERS} tensors: it has {key} = {value}")
        return value

    def alias_keys(self, names: Mapping[str, str]) -> ModelConfig:
        """Return this config with the keys of `names` also known by their values, which it may have itself.

        >>> ModelConfig({"num_attention_heads": 8}).alias_keys({"num_attention_heads": "n_head"}).size("n_head")
        8
        """
        known = {key: self.values[other] for other, key in names.items() if other in self.values}
        return replace(self, values={**known, **self.values})

    def over(self, defaults: Mapping[str, object]) -> ModelConfig:
        """Return this config with `defaults` for keys that are absent, and for configs within it that are null.

        Any other null stays one: config classes refuse it, or give it a meaning of its own.
        """
        inner = {key for key, value in defaults.items() if isinstance(value, dict) and self.values.get(key) is None}
        said = {key: value for key, value in self.values.items() if key not in inner}
        return replace(self, values={**defaults, **said})

    def part(self, key: str) -> ModelConfig:
        """Return the config that lies in this one under `key`; raises SourceError if there is none."""
        value = self.values.get(key)
        if not isinstance(value, dict):
            raise SourceError(f"{self.file} has no {key!r}", hint="without it the model's shapes are unknown")
        return replace(self, values=value)

    def count(self, key: str, default: int) -> int:
        """Return a whole number that may be zero; raises SourceError if it is none."""
        value = self.values.get(key, default)
        return 0 if value == 0 and not isinstance(value, bool) else self.size(key, default)

    def divided(self, key: str, by: str) -> int:
        """Return the quotient of two sizes, such as the dim of a head; raises SourceError if there is a remainder."""
        whole, parts = self.size(key), self.size(by)
        if whole % parts:
            raise SourceError(f"{self.file} has {key} = {whole}, which {by} = {parts} does not divide")
        return whole // parts

    def shared_by(self, heads: int, key: str, default: int) -> int:
        """Return how many key/value heads the query heads share, each the same number of them.

        Raises SourceError for a number that does not divide them: no implementation of attention has such a model.
        """
        groups = self.size(key, default)
        if heads % groups:
            raise SourceError(f"{self.file} has {key} = {groups}, which does not divide its {heads} attention heads")
        return groups

    def read_flag(self, key: str, *, default: bool) -> bool:
        """Return a boolean; raises SourceError if it is anything else."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise SourceError(f"{self.file} has {key} = {value!r} where true or false is expected")
        return value

    def number(self, key: str, default: float) -> float:
        """Return a finite number that is not zero; raises SourceError if it is anything else."""
        value = self.values.get(key)
        if value is None:
            return default
        if not is_finite_number(value) or not value:
            raise SourceError(f"{self.file} has {key} = {value!r} where a number is expected")
        return float(value)

    def text(self, key: str, default: str) -> str:
        """Return a string; raises SourceError if it is anything else."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise SourceError(f"{self.file} has {key} = {value!r} where a string is expected")
        return value

    def entries(self, key: str) -> list[Any] | None:
        """Return a list that has a name or a number for each of something; None where the key is absent.

        Raises SourceError for anything else.
        """
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(entry, str | int) for entry in value):
            raise SourceError(f"{self.file} has {key} = {value!r} where a list of names or numbers is expected")
        return value

    def labels(self) -> int:
        """Return outputs of a classification head: the length of `id2label`, else `num_labels`, else 2."""
        names = self.values.get("id2label")
        if isinstance(names, dict) and names:
            return len(names)
        return self.size("num_labels", _DEFAULT_LABELS)

    def declared(self) -> DType | None:
        """Return the element type the model declares (`dtype`, formerly `torch_dtype`), or its text model does, if any.

        Raises SourceError for a type that does not exist.
        """
        name = (self.text("dtype", "") or self.text("torch_dtype", "")).removeprefix("torch.")
        text = self.values.get("text_config")
        if name in ("", "auto"):
            return ModelConfig(text).declared() if isinstance(text, dict) else None
        if name not in BY_TORCH:
            raise SourceError(f"{self.file} has dtype {name!r}, which is not an element type")
        return BY_TORCH[name]

    def dtype(self) -> DType:
        """Return the declared type, else that which transformers would make the model in.

        It is F32, but what is not quantized of a quantized model is in 16 bits (quantizers/, `update_dtype`).
        """
        return self.declared() or BY_NAME["BF16" if self.values.get("quantization_config") else "F32"]

    def architecture(self) -> str:
        """Return the first of `architectures`, or an empty string."""
        value = self.values.get("architectures")
        if isinstance(value, list) and value and isinstance(value[0], str):
            return value[0]
        return ""
