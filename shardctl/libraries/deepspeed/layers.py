"""Reads the files of a pipeline's layers, which may be the only ones with the module's state.

DeepSpeed `runtime/pipe/module.py` (`ckpt_layer_path`, `save_state_dict`).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from shardctl.libraries.deepspeed.model_states import collect_tensors
from shardctl.libraries.torch_save.reading import open_saved

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.libraries.deepspeed.checkpoint_pieces import CheckpointPieces
    from shardctl.libraries.deepspeed.files import DeepSpeedFiles
    from shardctl.libraries.deepspeed.model_states import ModelState
    from shardctl.storage import Source

_TIED: Final = re.compile(r"tied_modules\.[^.]+\.(.+)")


def read_layers(
    source: Source, files: DeepSpeedFiles, models: Mapping[int, ModelState], found: CheckpointPieces
) -> None:
    """Note what each layer's file has, under the names that the whole pipeline has for it.

    Layers that are tied have a name in common; each of their files has a copy.
    """
    shapes = {name: shape for state in models.values() for group in state.groups or () for name, shape in group.items()}
    tied: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for name, shape in shapes.items():
        m = _TIED.fullmatch(name)
        if m is not None:
            tied.setdefault((m[1], shape), []).append(name)
    for (layer, rank), path in sorted(files.layers.items()):
        saved = open_saved(source, path)
        held, others = collect_tensors(saved, saved.tree)
        for local, array in held.items():
            name = f"{layer}.{local}"
            known = tied.get((local, array.shape), [])
            if name not in shapes and len(known) == 1:
                name = known[0]
            found.module.add_array(name, rank, array)
        found.others += [(key, path) for key in others]
