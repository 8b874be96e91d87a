"""Kinds of faults of what other libraries read: optimizer states, settings of trainers and runtimes, and code."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fault_files import FileKind
    from fault_kinds import FaultKind
    from fault_parts import RankDirectory, StoredPart

SETTINGS = "optimizer.json"
MOMENT = r"^optimizer\.exp_avg\."


# Optimizer states ---------------------------------------------------------------------------------------------------


def _choose_moment(edit: RankDirectory) -> StoredPart | None:
    return edit.choose([part for part in edit.find(MOMENT) if part.data])


def change_moment(edit: RankDirectory) -> bool:
    """A moment is half a unit off."""
    part = _choose_moment(edit)
    if part is None:
        return False
    values = np.frombuffer(part.data, "<f4") + np.float32(0.5)
    part.data[:] = values.tobytes()
    return True


def exchange_moments(edit: RankDirectory) -> bool:
    """Two parameters of one shape have each other's first moments, on every rank."""
    shapes: dict[tuple[int, ...], list[str]] = {}
    for part in edit.find(MOMENT):
        names = shapes.setdefault(tuple(part.place["global_shape"] if part.place else part.shape), [])
        if part.name not in names:
            names.append(part.name)
    pair = edit.choose([names[:2] for names in shapes.values() if len(names) > 1])
    if pair is None:
        return False
    swap = dict(zip(pair, reversed(pair), strict=True))
    for part in edit.parts:
        part.name = swap.get(part.name, part.name)
    return True


def exchange_kinds(edit: RankDirectory) -> bool:
    """A parameter has its second moment in place of its first, on every rank."""
    part = _choose_moment(edit)
    if part is None:
        return False
    first, second = part.name, part.name.replace(".exp_avg.", ".exp_avg_sq.")
    for each in edit.parts:
        each.name = {first: second, second: first}.get(each.name, each.name)
    return True


def lose_moment(edit: RankDirectory) -> bool:
    """A first moment is missing on every rank."""
    part = _choose_moment(edit)
    if part is None:
        return False
    edit.parts = [each for each in edit.parts if each.name != part.name]
    return True


def round_moment(edit: RankDirectory) -> bool:
    """A moment went through bf16, as a cast of the weights by mistake does."""
    part = _choose_moment(edit)
    if part is None:
        return False
    values = torch.frombuffer(part.data, dtype=torch.float32)
    rounded = values.bfloat16().float()
    if bool((rounded == values).all()):
        return False
    part.data[:] = rounded.numpy().tobytes()
    return True


STATE_KINDS: dict[str, FaultKind] = {
    "a moment that is half a unit off": change_moment,
    "first moments of two parameters exchanged": exchange_moments,
    "the moments of a parameter exchanged": exchange_kinds,
    "a moment missing everywhere": lose_moment,
    "a moment rounded to bf16": round_moment,
}


# Settings -----------------------------------------------------------------------------------------------------------


def _edit_json(file: Path, change: Callable[[Any], None]) -> bool:
    if not file.exists():
        return False
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    return True


def count_a_step_more(place: Path, _other: Path) -> bool:
    """The optimizer has done one step more."""
    return _edit_json(place / SETTINGS, lambda said: said.update(step=said["step"] + 1))


def change_rate(place: Path, _other: Path) -> bool:
    """The optimizer has another learning rate."""
    return _edit_json(place / SETTINGS, lambda said: said["groups"][0]["settings"].update(lr=0.125))


def edit_params(place: Path, **changes: object) -> bool:
    """Meta's `params.json` has another value."""
    return _edit_json(place / "params.json", lambda said: said.update(changes))


def edit_args(place: Path, **changes: object) -> bool:
    """Megatron-LM's namespace has another value."""
    found = [*place.rglob("model_optim_rng.pt"), *place.rglob("common.pt")]
    for file in found:
        state = torch.load(file, weights_only=False)
        for name, value in changes.items():
            assert getattr(state["args"], name) != value
            setattr(state["args"], name, value)
        torch.save(state, file)
    return bool(found)


TRAINER_KINDS: dict[str, FileKind] = {
    "one step more": count_a_step_more,
    "another learning rate": change_rate,
}
PARAMS_KINDS: dict[str, FileKind] = {
    "params.json: an epsilon": lambda place, _: edit_params(place, norm_eps=0.125),
    "params.json: the base of rotary embeddings": lambda place, _: edit_params(place, rope_theta=12_345.0),
}
ARGS_KINDS: dict[str, FileKind] = {
    "args: an epsilon": lambda place, _: edit_args(place, norm_epsilon=0.125),
    "args: the base of rotary embeddings": lambda place, _: edit_args(place, rotary_base=12_345),
    "args: the gate of the MLP": lambda place, _: edit_args(place, swiglu=False),
}
SETTING_KINDS = {**TRAINER_KINDS, **PARAMS_KINDS, **ARGS_KINDS}


# Code and tokenizers ------------------------------------------------------------------------------------------------


def _edit_config(place: Path, **changes: object) -> bool:
    def change(config: Any) -> None:
        config.update({key: value for key, value in changes.items() if value is not None})
        for key in [key for key, value in changes.items() if value is None]:
            config.pop(key)

    return _edit_json(place / "config.json", change)


def add_code(place: Path, _other: Path) -> bool:
    """The config names a class in a file of code that the source lacks."""
    (place / "modeling_x.py").write_text("class Model:\n    pass\n")
    return _edit_config(place, auto_map={"AutoModelForCausalLM": "modeling_x.Model"})


def add_template(place: Path, _other: Path) -> bool:
    """There is a chat template that the source lacks."""
    (place / "chat_template.jinja").write_text("{{ messages }}")
    return True


def lose_tokenizer(place: Path, _other: Path) -> bool:
    """The tokenizer is missing."""
    (place / "tokenizer.json").unlink()
    return True


CODE_KINDS: dict[str, FileKind] = {
    "code that the source lacks": add_code,
    "a chat template that the source lacks": add_template,
    "no tokenizer": lose_tokenizer,
}
NAME_KINDS: dict[str, FileKind] = {
    "config: another model_type": lambda place, _: _edit_config(place, model_type="opt"),
    "config: no model_type": lambda place, _: _edit_config(place, model_type=None),
    "config: no architectures": lambda place, _: _edit_config(place, architectures=None),
}
