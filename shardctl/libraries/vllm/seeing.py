"""Describes vLLM's arrays of models that see: those of the text model under `language_model.`, and of the vision model.

Names and cuts are those of vLLM 0.32.0, `model_executor/models/` (`qwen3_vl.py`, `qwen3_5.py`, `gemma4_mm.py`), as it
serves them unless told otherwise: ``--mm-encoder-tp-mode weights``, which cuts the vision model too where it can.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.libraries.arrays.composite import SchemaEntry, join_arrays
from shardctl.libraries.vllm.decoders import list_decoder_entries

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardctl.libraries.vllm.rank import VllmRank
    from shardctl.models import Model

_TEXT: Final = "model.language_model"
_EYES: Final = "model.visual."
_COLUMNS: Final = (".linear_fc1.weight", ".linear_fc1.bias")
_ROWS: Final = (".linear_fc2.weight", ".attn.proj.weight")


def list_qwen_eyes_entries(here: VllmRank, model: Model) -> Iterator[SchemaEntry]:
    """List Qwen3-VL and Qwen3.5, whose vision model is cut by heads and by columns."""
    yield from _list_text(here, model)
    for tensor in model.own():
        if not tensor.name.startswith(_EYES):
            continue
        content = here[tensor.name]
        if ".attn.qkv." in tensor.name:
            content = join_arrays([part.share(0, here.index, here.tp) for part in content.shares(0, 3)])
        elif tensor.name.endswith(_COLUMNS):
            content = here.rows(tensor.name)
        elif tensor.name.endswith(_ROWS):
            content = here.columns(tensor.name)
        yield SchemaEntry(tensor.name.removeprefix("model."), content)


def list_gemma4_entries(here: VllmRank, model: Model) -> Iterator[SchemaEntry]:
    """List Gemma 4, whose towers are transformers' modules, whole on every rank."""
    yield from _list_text(here, model)
    for tensor in model.own():
        if not tensor.name.startswith((_TEXT, "lm_head.")):
            yield SchemaEntry(tensor.name.removeprefix("model."), here[tensor.name])


def _list_text(here: VllmRank, model: Model) -> Iterator[SchemaEntry]:
    for entry in list_decoder_entries(replace(here, parts=replace(here.parts, inner=_TEXT)), model):
        yield replace(entry, name=f"language_model.{entry.name}")
