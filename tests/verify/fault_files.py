"""Kinds of faults of whole files: damage, files of another run, indexes, configs and side files."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import transformers
from fault_states import NAME_KINDS, SETTING_KINDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    FileKind = Callable[[Path, Path], bool]
    """Changes a directory, and is given that of another run; returns whether there was something to change."""


def _last_weights(place: Path) -> Path:
    return max(place.glob("*.safetensors"))


def truncate_file(place: Path, _other: Path) -> bool:
    """A file lacks its last bytes."""
    file = _last_weights(place)
    file.write_bytes(file.read_bytes()[:-5])
    return True


def lengthen_file(place: Path, _other: Path) -> bool:
    """A file has bytes after its last tensor."""
    file = _last_weights(place)
    file.write_bytes(file.read_bytes() + bytes(8))
    return True


def empty_file(place: Path, _other: Path) -> bool:
    """A file has no bytes."""
    _last_weights(place).write_bytes(b"")
    return True


def damage_header(place: Path, _other: Path) -> bool:
    """A character of a header is another one."""
    file = _last_weights(place)
    content = bytearray(file.read_bytes())
    content[content.index(b"data_offsets") + 3] ^= 1
    file.write_bytes(content)
    return True


def damage_header_length(place: Path, _other: Path) -> bool:
    """The length of a header is wrong."""
    file = _last_weights(place)
    content = bytearray(file.read_bytes())
    content[0] ^= 8
    file.write_bytes(content)
    return True


def move_offsets(place: Path, _other: Path) -> bool:
    """Two tensors of one size in a header have each other's offsets."""
    file = _last_weights(place)
    content = file.read_bytes()
    length = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:length])
    sizes: dict[tuple[str, int], str] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        a, b = entry["data_offsets"]
        first = sizes.setdefault((entry["dtype"], b - a), name)
        if first != name and content[length + a : length + b] != _read_span(content, length, header[first]):
            header[first]["data_offsets"], entry["data_offsets"] = entry["data_offsets"], header[first]["data_offsets"]
            text = json.dumps(header, separators=(",", ":")).encode()
            text += b" " * (-len(text) % 8)
            file.write_bytes(len(text).to_bytes(8, "little") + text + content[length:])
            return True
    return False


def _read_span(content: bytes, start: int, entry: dict[str, Any]) -> bytes:
    a, b = entry["data_offsets"]
    return content[start + a : start + b]


def leave_stale_file(place: Path, other: Path) -> bool:
    """A file is that of another run with the same cut."""
    file = _last_weights(place)
    if not (other / file.name).exists():
        return False
    shutil.copy(other / file.name, file)
    return True


def add_whole_file(place: Path, other: Path) -> bool:
    """A file with all tensors of another run lies beside."""
    whole = other.parent / "whole" / "model.safetensors"
    shutil.copy(whole, place / "consolidated.safetensors")
    return True


# Files with an index -----------------------------------------------------------------------------------------------


def _edit_index(place: Path) -> tuple[Path, dict[str, Any]] | None:
    file = place / "model.safetensors.index.json"
    return (file, json.loads(file.read_text())) if file.exists() else None


def lose_index(place: Path, _other: Path) -> bool:
    """The index is missing."""
    found = _edit_index(place)
    if found is not None:
        found[0].unlink()
    return found is not None


def point_to_another_file(place: Path, _other: Path) -> bool:
    """The index says that a tensor is in a file that does not have it."""
    found = _edit_index(place)
    if found is None:
        return False
    file, index = found
    names = index["weight_map"]
    first = min(names)
    names[first] = next(other for other in names.values() if other != names[first])
    file.write_text(json.dumps(index))
    return True


def forget_in_index(place: Path, _other: Path) -> bool:
    """The index names no tensor of a file; of one that it names, loaders read all tensors."""
    found = _edit_index(place)
    if found is None:
        return False
    file, index = found
    last = max(index["weight_map"].values())
    index["weight_map"] = {name: other for name, other in index["weight_map"].items() if other != last}
    file.write_text(json.dumps(index))
    return True


def repeat_in_second_file(place: Path, _other: Path) -> bool:
    """A tensor is in two files of an index, with other values in the one that the index does not name."""
    found = _edit_index(place)
    if found is None:
        return False
    _, index = found
    name = min(index["weight_map"])
    named = place / index["weight_map"][name]
    file = place / next(each for each in index["weight_map"].values() if each != named.name)
    content, theirs = file.read_bytes(), named.read_bytes()
    start, begin = (8 + int.from_bytes(each[:8], "little") for each in (content, theirs))
    header, entry = json.loads(content[8:start]), json.loads(theirs[8:begin])[name]
    data = bytearray(_read_span(theirs, begin, entry))
    data[0] ^= 1
    size = len(content) - start
    header[name] = {**entry, "data_offsets": [size, size + len(data)]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[start:] + data)
    return True


# Configs and side files --------------------------------------------------------------------------------------------

_ACTIVATIONS = ("hidden_act", "activation_function", "hidden_activation", "mlp_hidden_act")
_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps")
EDITS: dict[str, tuple[tuple[str, ...], Callable[[Any], Any]]] = {
    "the activation function": (
        _ACTIVATIONS,
        lambda _: "relu",
    ),
    "an epsilon": (
        _EPSILONS,
        lambda _: 0.125,
    ),
    "the base of rotary embeddings": (("rope_theta", "rotary_emb_base"), lambda _: 5e5),
    "the number of layers": (("num_hidden_layers", "n_layer"), lambda n: n - 1),
    "the number of heads": (("num_attention_heads", "n_head"), lambda n: n // 2),
    "the vocabulary's size": (("vocab_size",), lambda n: n + 8),
    "experts per token": (("num_experts_per_tok",), lambda n: n - 1),
    "tied embeddings": (("tie_word_embeddings",), lambda tied: not tied),
    "the type of the model": (("architectures",), lambda _: ["OPTForCausalLM"]),
    "a window": (("sliding_window",), lambda _: 3),
}
"""What of a config is changed: the keys under which it may be, and how."""


def edit_config(place: Path, what: str) -> bool:
    """Change a setting of the config."""
    file = place / "config.json"
    config = json.loads(file.read_text())
    known = getattr(transformers, config["architectures"][0]).config_class().to_dict() | config
    keys, change = EDITS[what]
    inside = known.get("rope_parameters") or {}
    key = next((key for key in keys if known.get(key) is not None), None)
    if key is not None:
        config[key] = change(known[key])
    elif keys[0] in inside:
        config["rope_parameters"] = inside | {keys[0]: change(inside[keys[0]])}
    else:
        return False
    file.write_text(json.dumps(config))
    return True


def lose_config(place: Path, _other: Path) -> bool:
    """There is no config."""
    (place / "config.json").unlink()
    return True


def edit_tokenizer(place: Path, _other: Path) -> bool:
    """The tokenizer has other words."""
    file = place / "tokenizer.json"
    file.write_text(file.read_text().replace('"b": 1', '"c": 1'))
    return True


def edit_merges(place: Path, _other: Path) -> bool:
    """A side file that is no JSON has other content."""
    (place / "merges.txt").write_text("a c\n")
    return True


def edit_generation(place: Path, _other: Path) -> bool:
    """The settings for generation have another end of text."""
    (place / "generation_config.json").write_text('{"eos_token_id": 3}')
    return True


def add_code(place: Path, _other: Path) -> bool:
    """A file of code lies beside the weights."""
    (place / "modeling_evil.py").write_text("import os\n")
    return True


def add_auto_map(place: Path, _other: Path) -> bool:
    """The config names classes in code of another repository."""
    file = place / "config.json"
    references = {"AutoModelForCausalLM": "someone/else--modeling.Evil"}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"auto_map": references}))
    return True


def add_template(place: Path, _other: Path) -> bool:
    """A chat template lies beside the weights."""
    (place / "chat_template.jinja").write_text("{{ messages }}")
    return True


def _lose(name: str) -> FileKind:
    """A file that from_pretrained reads is missing."""

    def lose(place: Path, _other: Path) -> bool:
        (place / name).unlink()
        return True

    return lose


def _list_edits() -> Iterator[tuple[str, FileKind]]:
    for what in EDITS:
        yield f"config: {what}", lambda place, _other, what=what: edit_config(place, what)


FILE_KINDS: dict[str, FileKind] = {
    "a file cut short": truncate_file,
    "a file too long": lengthen_file,
    "a file without bytes": empty_file,
    "a character of a header": damage_header,
    "the length of a header": damage_header_length,
    "offsets of two tensors exchanged": move_offsets,
    "a file of another run": leave_stale_file,
    "a second file with other values": add_whole_file,
    "no index": lose_index,
    "an index that points to another file": point_to_another_file,
    "an index that lacks a file": forget_in_index,
    "a tensor twice with other values": repeat_in_second_file,
}
BESIDE_KINDS: dict[str, FileKind] = {
    **dict(_list_edits()),
    "no config": lose_config,
    "words of the tokenizer": edit_tokenizer,
    "merges of the tokenizer": edit_merges,
    "settings for generation": edit_generation,
    **NAME_KINDS,
    **SETTING_KINDS,
    "code that was added": add_code,
    "an auto_map that was added": add_auto_map,
    "a chat template that was added": add_template,
    "no tokenizer": _lose("tokenizer.json"),
    "no settings of the tokenizer": _lose("tokenizer_config.json"),
    "no settings for generation": _lose("generation_config.json"),
}
