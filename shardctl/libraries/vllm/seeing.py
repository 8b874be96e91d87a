"""Describes vLLM's arrays of models that see: those of the text model under `language_model.`, and of the vision model.

Names and cuts are those of vLLM 0.32.0, `model_executor/models/` (`qwen2_vl.py`, `qwen2_5_vl.py`,
`qwen3_vl.py`, `qwen3_5.py`, `gemma4_mm.py`), as it
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
_COLUMNS: Final = tuple(
    f"{name}.{kind}" for name in (".linear_fc1", ".mlp.fc1", ".mlp.0") for kind in ("weight", "bias")
)
_ROWS: Final = tuple(f"{name}.weight" for name in (".linear_fc2", ".mlp.fc2", ".mlp.2", ".mlp.down_proj", ".attn.proj"))
_GATE, _UP = ".mlp.gate_proj.", ".mlp.up_proj."


def list_qwen_eyes_entries(here: VllmRank, model: Model) -> Iterator[SchemaEntry]:
    """List Qwen2-VL, Qwen3-VL and Qwen3.5, whose vision model is cut by heads and by columns."""
    yield from _list_text(here, model)
    for tensor in model.own():
        if not tensor.name.startswith(_EYES):
            continue
        name, content = tensor.name, here[tensor.name]
        if _UP in name:
            continue
        if _GATE in name:
            content = join_arrays([here.rows(name), here.rows(name.replace(_GATE, _UP))])
            name = name.replace(_GATE, ".mlp.gate_up_proj.")
        elif ".attn.qkv." in name and model.family == "qwen2_vl":  # whose ranks gather all rows before they part them
            content = here.rows(name)
        elif ".attn.qkv." in name:
            content = join_arrays([part.share(0, here.index, here.tp) for part in content.shares(0, 3)])
        elif name.endswith(_COLUMNS):
            content = here.rows(name)
        elif name.endswith(_ROWS):
            content = here.columns(name)
        yield SchemaEntry(name.removeprefix("model."), content)


def list_gemma4_entries(here: VllmRank, model: Model) -> Iterator[SchemaEntry]:
    """List Gemma 4, whose towers are transformers' modules, whole on every rank."""
    yield from _list_text(here, model)
    for tensor in model.own():
        if not tensor.name.startswith((_TEXT, "lm_head.")):
            yield SchemaEntry(tensor.name.removeprefix("model."), here[tensor.name])


def _list_text(here: VllmRank, model: Model) -> Iterator[SchemaEntry]:
    for entry in list_decoder_entries(replace(here, parts=replace(here.parts, inner=_TEXT)), model):
        yield replace(entry, name=f"language_model.{entry.name}")
