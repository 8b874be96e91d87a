"""Parses `--megatron`, which says which of Megatron-LM's layers will load what is written."""

from __future__ import annotations

from typing import Final

from shardctl.base.errors import UsageError
from shardctl.base.value import value_class
from shardctl.libraries.megatron.args_writing import DIVISIBLE

OPTION: Final = "megatron"
_CHOICES_BY_OPTION: Final = {
    "layers": ("transformer-engine", "local"),
    "experts": ("sequential", "grouped"),
    "padding": ("zeros", "last-row"),
    "core": ("0.19", "0.17", "0.16"),
    "optimizer": ("distributed", "replicated"),
}
_NUMERIC_OPTIONS: Final = ("virtual", "multiple")


@value_class
class MegatronOptions:
    """Which of Megatron-LM's layers are to load the files, and how it runs them."""

    local: bool = False
    """Whether layers are megatron-core's own, `--transformer-impl local`; else Transformer Engine's."""
    grouped: bool = False
    """Whether experts are in one module, `--moe-grouped-gemm`."""
    last_row: bool = False
    """Whether the vocabulary is padded with its last row, as by `tools/checkpoint`; else with zeros."""
    chunks: int = 1
    """Chunks of layers on each stage, of a virtual pipeline."""
    older: bool = False
    """Whether core is 0.16 or older, which has another name for the module inside layers that predict; else newer."""
    newest: bool = True
    """Whether core is 0.19 or newer, whose Mamba has no module for its convolution."""
    multiple: int = DIVISIBLE
    """Times tp, what the vocabulary is padded to a multiple of, `--make-vocab-size-divisible-by`."""

    replicated: bool = False
    """Whether optimizer states are for one that is not distributed; else for `--use-distributed-optimizer`."""

    @classmethod
    def parse(cls, text: str) -> MegatronOptions:
        """Parse text such as ``layers=local,virtual=2``; raises UsageError for anything else.

        >>> options = MegatronOptions.parse("layers=local,multiple=16")
        >>> options.local, options.multiple, options.newest, options.replicated
        (True, 16, True, False)
        """
        given: dict[str, str] = {}
        for part in filter(None, text.split(",")):
            key, _, value = part.partition("=")
            number = key in _NUMERIC_OPTIONS and value.isascii() and value.isdigit() and int(value) > 0
            if (not number and value not in _CHOICES_BY_OPTION.get(key, ())) or key in given:
                choices = [f"{each}={'|'.join(values)}" for each, values in _CHOICES_BY_OPTION.items()]
                raise UsageError(
                    f"cannot read part {part!r} of --megatron",
                    hint=f"parts are {', '.join((*choices, *(f'{each}=N' for each in _NUMERIC_OPTIONS)))}",
                )
            given[key] = value
        return cls(
            given.get("layers") == "local",
            given.get("experts") == "grouped",
            given.get("padding") == "last-row",
            int(given.get("virtual", 1)),
            given.get("core") == "0.16",
            given.get("core", "0.19") == "0.19",
            int(given.get("multiple", DIVISIBLE)),
            given.get("optimizer") == "replicated",
        )
