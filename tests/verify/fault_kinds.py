"""Kinds of faults: what a tool that cuts checkpoints could get wrong in the files of ranks.

A kind changes a directory and returns True, or returns False if the directory has nothing that it could change.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from fault_states import STATE_KINDS

from shardctl.base.dtype import BY_NAME

if TYPE_CHECKING:
    from collections.abc import Callable

    from fault_parts import RankDirectory, StoredPart

    FaultKind = Callable[[RankDirectory], bool]

NORM = r"(norm\d?|ln_\d|ln_f|layernorm)\.weight$"
LINEAR = r"(proj|c_attn|c_fc|c_proj|query_key_value|dense\w*)\.(q?weight)$"
QUERY, KEY, VALUE = r"self_attn\.q_proj\.q?weight$", r"\.k_proj\.q?weight$", r"\.v_proj\.q?weight$"
FUSED = r"(qkv_proj|c_attn|query_key_value|gate_up_proj)\.weight$"
GATE, UP, DOWN = r"\.(gate_proj|w1)\.q?weight$", r"\.(up_proj|w3)\.q?weight$", r"\.(down_proj|w2|c_proj)\.q?weight$"
EXPERT = r"experts\b"
FIRST_HALF, SECOND_HALF = (
    r"experts\.(\d+\.(w1|w3|gate_proj|up_proj)|gate_up_proj|up_proj)",
    r"experts\.(\d+\.(w2|down_proj)|down_proj)",
)
SCALE = r"\.(weight_scale_inv|scales|qzeros)$"
CONVOLUTION, STATE = r"conv1d\.weight$", r"\.(A_log|dt_bias)$"
LATENT = r"\.(q_b_proj|kv_b_proj)\.weight$"
VOCABULARY = r"(embed_tokens|wte|embed_in|lm_head|embed_out|embeddings)\.weight$"
_FLOATS: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
LAYER = r"\.(layers|h)\.(\d+)\."


# Values ------------------------------------------------------------------------------------------------------------


def _choose_linear(edit: RankDirectory) -> StoredPart | None:
    found = edit.find(LINEAR) or edit.find(r"proj")
    return edit.choose([part for part in found if len(part.shape) > 1 and part.shape[0] > 1])


def flip_a_bit(edit: RankDirectory) -> bool:
    """One bit of one element is turned over."""
    part = _choose_linear(edit)
    if part is None:
        return False
    part.data[int(edit.random.integers(len(part.data)))] ^= 1 << int(edit.random.integers(8))
    return True


def exchange_rows(edit: RankDirectory) -> bool:
    """Two rows of a slice change places."""
    part = _choose_linear(edit)
    if part is None:
        return False
    rows = part.array()
    rows[[0, -1]] = rows[[-1, 0]]
    return True


def move_rows(edit: RankDirectory) -> bool:
    """A slice has the values of the rows from the next one on."""
    part = _choose_linear(edit)
    if part is None:
        return False
    part.array()[...] = np.roll(part.array(), 1, 0)
    return True


def transpose_values(edit: RankDirectory) -> bool:
    """A square slice has its values transposed."""
    part = edit.choose([p for p in edit.find(LINEAR) if len(p.shape) == 2 and p.shape[0] == p.shape[1] > 1])
    if part is None:
        return False
    part.array()[...] = part.array().T.copy()
    return True


def clear_values(edit: RankDirectory) -> bool:
    """A slice was never written."""
    part = _choose_linear(edit)
    if part is None:
        return False
    part.data[:] = bytes(len(part.data))
    return True


def change_replica(edit: RankDirectory) -> bool:
    """One rank's copy of what several hold differs."""
    held: dict[tuple[str, str], list[StoredPart]] = {}
    for part in edit.find(NORM):
        held.setdefault((part.name, str(part.place)), []).append(part)
    parts = edit.choose([parts for parts in held.values() if len(parts) > 1])
    if parts is None:
        return False
    parts[-1].data[1] ^= 1
    return True


def _exchange_data(one: StoredPart, other: StoredPart) -> bool:
    if one.data == other.data or len(one.data) != len(other.data):
        return False
    one.data[:], other.data[:] = bytes(other.data), bytes(one.data)
    return True


def _exchange_slices(edit: RankDirectory, pattern: str) -> bool:
    chosen = edit.choose(edit.list_cut(pattern))
    if chosen is None:
        return False
    name, one, other = chosen
    a, b = ([p for p in edit.on(rank) if p.name == name] for rank in (one, other))
    changed = [_exchange_data(x, y) for x, y in zip(a, b, strict=True)]
    return all(changed)


def exchange_slices(edit: RankDirectory) -> bool:
    """Two ranks have each other's values of a tensor."""
    return _exchange_slices(edit, LINEAR)


def exchange_values_of_keys(edit: RankDirectory) -> bool:
    """Two ranks have each other's values of key heads."""
    return _exchange_slices(edit, KEY)


def exchange_values_of_experts(edit: RankDirectory) -> bool:
    """Two ranks have each other's values of the first half of their experts."""
    return _exchange_slices(edit, r"experts\.gate_up_proj$")


def exchange_gate_and_up(edit: RankDirectory) -> bool:
    """A rank has gate's values in up, and up's in gate."""
    gate = edit.choose(edit.find(GATE))
    if gate is None:
        return False
    names = {gate.name.replace("gate_proj", "up_proj").replace(".w1.", ".w3.")}
    up = next((p for p in edit.on(gate.rank) if p.name in names and p.place == gate.place), None)
    return up is not None and _exchange_data(gate, up)


def exchange_layers(edit: RankDirectory) -> bool:
    """Two layers have each other's values of a tensor on every rank that holds both."""
    found = [p for p in edit.find(LINEAR) if ".0." in p.name]
    first = edit.choose(found)
    if first is None:
        return False
    done = False
    for rank in edit.ranks:
        mine = {(p.name, str(p.place)): p for p in edit.on(rank)}
        for (name, place), part in list(mine.items()):
            other = mine.get((name.replace(".0.", ".1.", 1), place)) if name == first.name else None
            done |= other is not None and other is not part and _exchange_data(part, other)
    return done


def take_scales_of_another_block(edit: RankDirectory) -> bool:
    """Two scales of blocks change places."""
    part = edit.choose([p for p in edit.find(SCALE) if p.array().size > 1])
    if part is None:
        return False
    values = part.array().reshape(-1)
    other = next((n for n in range(1, values.size) if values[n] != values[0]), None)
    if other is None:
        return False
    values[[0, other]] = values[[other, 0]]
    return True


def take_scales_of_another_layer(edit: RankDirectory) -> bool:
    """The scales of a weight are those of the same weight in another layer."""
    part = edit.choose([p for p in edit.find(SCALE) if ".0." in p.name])
    if part is None:
        return False
    name = part.name.replace(".0.", ".1.", 1)
    other = next((p for p in edit.on(part.rank) if p.name == name and p.place == part.place), None)
    return other is not None and _exchange_data(part, other)


def _round_values(edit: RankDirectory, narrow: dict[str, Any]) -> bool:
    """Round a part to the type that `narrow` has for its own, to nearest and ties to even, and back."""
    part = edit.choose([p for p in edit.find(LINEAR) + edit.find(NORM) if p.dtype in narrow])
    if part is None:
        return False
    before, dtype = bytes(part.data), _FLOATS[part.dtype]
    part.data[:] = np.frombuffer(before, dtype).astype(narrow[part.dtype]).astype(dtype).tobytes()
    return bytes(part.data) != before


def round_to_bf16(edit: RankDirectory) -> bool:
    """The values of a tensor went through bf16, or fp8 if they were bf16."""
    return _round_values(edit, {"F32": ml_dtypes.bfloat16, "BF16": ml_dtypes.float8_e4m3fn})


def round_to_fp16(edit: RankDirectory) -> bool:
    """The values of a tensor went through fp16."""
    return _round_values(edit, {"F32": np.float16})


# Names, shapes and types -------------------------------------------------------------------------------------------


def lose_tensor(edit: RankDirectory) -> bool:
    """A tensor is missing on one rank."""
    part = _choose_linear(edit)
    if part is None:
        return False
    edit.parts = [p for p in edit.parts if (p.rank, p.name) != (part.rank, part.name)]
    return True


def lose_tensor_everywhere(edit: RankDirectory) -> bool:
    """A tensor is missing on every rank."""
    part = _choose_linear(edit)
    if part is None:
        return False
    edit.parts = [p for p in edit.parts if p.name != part.name]
    return True


def lose_norm(edit: RankDirectory) -> bool:
    """A norm is missing on one of the ranks that hold it."""
    counts: dict[str, list[StoredPart]] = {}
    for part in edit.find(NORM):
        counts.setdefault(part.name, []).append(part)
    part = edit.choose([parts[-1] for parts in counts.values() if len({p.rank for p in parts}) > 1])
    if part is None:
        return False
    edit.parts = [p for p in edit.parts if (p.rank, p.name) != (part.rank, part.name)]
    return True


def lose_scales(edit: RankDirectory) -> bool:
    """The scales of a weight are missing on one rank."""
    part = edit.choose(edit.find(SCALE))
    if part is None:
        return False
    edit.parts = [p for p in edit.parts if (p.rank, p.name) != (part.rank, part.name)]
    return True


def add_tensor(edit: RankDirectory) -> bool:
    """One rank has a tensor that no model has."""
    first = edit.on(edit.choose(edit.ranks))[0]
    place = {"saved_offsets": [0], "global_shape": [4]} if first.place is not None else None
    edit.parts.append(type(first)(first.rank, first.number, "model.extra.weight", "F32", [4], bytearray(16), place))
    return True


def rename_on_one_rank(edit: RankDirectory) -> bool:
    """A tensor has another name on one rank."""
    part = _choose_linear(edit)
    if part is None:
        return False
    for p in edit.on(part.rank):
        if p.name == part.name:
            p.name = p.name.replace("weight", "weights")
    return True


def rename_everywhere(edit: RankDirectory) -> bool:
    """A tensor has another name on every rank."""
    part = _choose_linear(edit)
    if part is None:
        return False
    name = part.name
    for p in edit.parts:
        if p.name == name:
            p.name = f"{name}_"
    return True


def exchange_names(edit: RankDirectory) -> bool:
    """Two layers have each other's names, on every rank."""
    if not any(".0." in p.name for p in edit.find(LAYER)):
        return False
    swap = {"0": "1", "1": "0"}
    for part in edit.find(r"\.(layers|h)\.[01]\."):
        head, word, tail = part.name.partition(".layers." if ".layers." in part.name else ".h.")
        part.name = f"{head}{word}{swap[tail[0]]}{tail[1:]}"
    return True


def change_type(edit: RankDirectory) -> bool:
    """A tensor's bytes are called another type of the same width."""
    part = _choose_linear(edit)
    if part is None:
        return False
    other = {"F32": "I32", "BF16": "F16", "F8_E4M3": "F8_E5M2", "I32": "F32", "F16": "BF16"}[part.dtype]
    for p in edit.parts:
        if p.name == part.name:
            p.dtype = other
    return True


def _cast_parts(edit: RankDirectory, pattern: str, dtype: str) -> bool:
    """Cast everything of a name to a narrower type, to nearest and ties to even."""
    parts = [p for p in edit.find(pattern) if p.dtype == "F32"]
    for p in parts:
        p.data = bytearray(np.frombuffer(p.data, np.float32).astype(_FLOATS[dtype]).tobytes())
        p.dtype = dtype
    return bool(parts)


def _cast_chosen(edit: RankDirectory, dtype: str) -> bool:
    part = edit.choose([p for p in edit.find(LINEAR) if p.dtype == "F32"])
    return part is not None and _cast_parts(edit, f"^{re.escape(part.name)}$", dtype)


def cast_to_bf16(edit: RankDirectory) -> bool:
    """A tensor is in bf16 on every rank."""
    return _cast_chosen(edit, "BF16")


def cast_to_fp16(edit: RankDirectory) -> bool:
    """A tensor is in fp16 on every rank."""
    return _cast_chosen(edit, "F16")


def cast_layer(edit: RankDirectory) -> bool:
    """All tensors of a layer are in bf16."""
    return _cast_parts(edit, r"^(?!optimizer\.).*\.(layers|h)\.1\.", "BF16")


def cast_norms(edit: RankDirectory) -> bool:
    """All norms are in bf16."""
    return _cast_parts(edit, rf"^(?!optimizer\.).*{NORM}", "BF16")


def reshape_tensor(edit: RankDirectory) -> bool:
    """A tensor says its sizes in the other order."""
    part = edit.choose([p for p in edit.find(LINEAR, ndim=2) if p.shape[0] != p.shape[1] and min(p.shape) > 1])
    if part is None:
        return False
    name = part.name
    for p in edit.parts:
        if p.name == name:
            p.shape = p.shape[::-1]
            p.place = {key: value[::-1] for key, value in p.place.items()} if p.place else None
    return True


# Places ------------------------------------------------------------------------------------------------------------


def _trade(edit: RankDirectory, *patterns: str) -> bool:
    """Let two ranks trade, with their places, what they have of a module's tensors that have one of some patterns."""
    chosen = edit.choose(edit.list_cut(patterns[0]))
    if chosen is None:
        return False
    name, one, other = chosen
    names = {name}
    if len(patterns) > 1:
        head = name.split("experts")[0] if "experts" in name else name.rpartition(".")[0]
        names |= {p.name for pattern in patterns for p in edit.find(pattern) if p.name.startswith(head)}
    edit.trade(names, one, other)
    return True


def trade_queries(edit: RankDirectory) -> bool:
    """Two ranks have each other's query heads, where they say so."""
    return _trade(edit, QUERY)


def trade_keys(edit: RankDirectory) -> bool:
    """Two ranks have each other's key heads, where they say so."""
    return _trade(edit, KEY)


def trade_values(edit: RankDirectory) -> bool:
    """Two ranks have each other's value heads, where they say so."""
    return _trade(edit, VALUE)


def trade_fused(edit: RankDirectory) -> bool:
    """Two ranks have each other's part of a fused tensor, where they say so."""
    return _trade(edit, FUSED)


def trade_gate(edit: RankDirectory) -> bool:
    """Two ranks have each other's columns of gate, where they say so."""
    return _trade(edit, GATE)


def trade_down(edit: RankDirectory) -> bool:
    """Two ranks have each other's columns of down, where they say so."""
    return _trade(edit, DOWN)


def trade_vocabulary(edit: RankDirectory) -> bool:
    """Two ranks have each other's rows of the vocabulary, where they say so."""
    return _trade(edit, VOCABULARY)


def trade_scales(edit: RankDirectory) -> bool:
    """Two ranks have each other's scales, and not the weights, where they say so."""
    return _trade(edit, SCALE)


def trade_latent(edit: RankDirectory) -> bool:
    """Two ranks have each other's heads of one projection out of the latents, where they say so."""
    return _trade(edit, LATENT)


def trade_convolution(edit: RankDirectory) -> bool:
    """Two ranks have each other's channels of a convolution, and not of its states, where they say so."""
    return _trade(edit, CONVOLUTION)


def trade_states(edit: RankDirectory) -> bool:
    """Two ranks have each other's heads of a state matrix, and not of its convolution, where they say so."""
    return _trade(edit, STATE)


def _list_experts(edit: RankDirectory, pattern: str) -> list[tuple[str, int, int]]:
    """List expert tensors of two ranks that could be traded: parts of one array, or experts of their own."""
    found = edit.list_cut(pattern)
    alone: dict[str, set[int]] = {}
    for part in edit.find(pattern):
        alone.setdefault(part.name, set()).add(part.rank)
    names = sorted(name for name, ranks in alone.items() if len(ranks) == 1 and ".experts." in name)
    for name in names:
        (one,) = alone[name]
        others = {rank for ranks in alone.values() for rank in ranks} - {one}
        found += [(name, one, other) for other in sorted(others)]
    return found


def trade_experts(edit: RankDirectory) -> bool:
    """Two ranks have each other's experts of a layer, with all their tensors, where they say so."""
    return _trade_experts(edit, EXPERT)


def trade_halves_of_experts(edit: RankDirectory) -> bool:
    """Two ranks have each other's gate and up of experts, and their own down, where they say so."""
    return _trade_experts(edit, FIRST_HALF)


def trade_down_of_experts(edit: RankDirectory) -> bool:
    """Two ranks have each other's down of experts, and their own gate and up, where they say so."""
    return _trade_experts(edit, SECOND_HALF)


def _trade_experts(edit: RankDirectory, pattern: str) -> bool:
    chosen = edit.choose(_list_experts(edit, pattern))
    if chosen is None:
        return False
    name, one, other = chosen
    head = name[: name.index("experts")]
    edit.trade({p.name for p in edit.find(pattern) if p.name.startswith(head)}, one, other)
    return True


def move_places(edit: RankDirectory) -> bool:
    """A rank says that its slice begins a row later, and another's a row earlier: they overlap and leave a hole."""
    part = edit.choose([p for p in edit.find(LINEAR) if not p.whole and p.place["saved_offsets"][0] > 0])
    if part is None:
        return False
    part.place["saved_offsets"][0] -= 1
    return True


def shift_cut(edit: RankDirectory) -> bool:
    """One rank has a row too much, and its neighbour one too few: every row is there once."""
    for name, one, other in edit.list_cut(LINEAR):
        a, b = ([p for p in edit.on(rank) if p.name == name] for rank in (one, other))
        if len(a) == len(b) == 1 and _is_next(a[0], b[0]):
            return _move_last_row(a[0], b[0])
    return False


def _is_next(one: StoredPart, other: StoredPart) -> bool:
    return (
        one.place["saved_offsets"][0] + one.shape[0] == other.place["saved_offsets"][0]
        and one.shape[1:] == other.shape[1:]
        and one.place["saved_offsets"][1:] == other.place["saved_offsets"][1:]
        and one.shape[0] > 1
    )


def _move_last_row(one: StoredPart, other: StoredPart) -> bool:
    row = len(one.data) // one.shape[0]
    other.data[:0] = one.data[-row:]
    del one.data[-row:]
    one.shape, other.shape = [one.shape[0] - 1, *one.shape[1:]], [other.shape[0] + 1, *other.shape[1:]]
    start = other.place["saved_offsets"]
    other.place = {**other.place, "saved_offsets": [start[0] - 1, *start[1:]]}
    return True


def cut_fused_as_one(edit: RankDirectory) -> bool:
    """A fused tensor is cut in two halves, through q, k and v or gate and up."""
    name = next((p.name for p in edit.find(FUSED, ndim=2) if p.place and not p.whole), None)
    if name is None or len(edit.ranks) != 2:
        return False
    parts = [p for p in edit.parts if p.name == name]
    shape = parts[0].place["global_shape"]
    width = BY_NAME[parts[0].dtype].bits // 8
    whole = np.zeros(shape, f"<u{width}")
    for p in parts:
        box = tuple(slice(o, o + s) for o, s in zip(p.place["saved_offsets"], p.shape, strict=True))
        whole[box] = p.array()
    dim = 0 if any(p.place["saved_offsets"][0] for p in parts) else 1
    halves = np.split(whole, 2, dim)
    if [(p.rank, p.shape) for p in parts] == [(n, list(half.shape)) for n, half in enumerate(halves)]:
        return False
    edit.parts = [p for p in edit.parts if p.name != name]
    for rank, half in enumerate(halves):
        start = [0] * half.ndim
        start[dim] = rank * half.shape[dim]
        place = {"saved_offsets": start, "global_shape": shape}
        data = bytearray(np.ascontiguousarray(half).tobytes())
        edit.parts.append(type(parts[0])(rank, 1, name, parts[0].dtype, list(half.shape), data, place))
    return True


def put_layer_on_another_stage(edit: RankDirectory) -> bool:
    """A layer is on the ranks of the other stage of two, each part on the rank with its place there."""
    return _move_to_stage(edit, lambda name, layer: layer in name)


def put_norm_on_another_stage(edit: RankDirectory) -> bool:
    """A norm of a layer is on the ranks of the other stage of two."""
    norm = edit.choose(sorted({p.name for p in edit.find(NORM) if ".0." in p.name}))
    return norm is not None and _move_to_stage(edit, lambda name, _layer: name == norm)


def _move_to_stage(edit: RankDirectory, chosen: Callable[[str, str], bool]) -> bool:
    if "pp" not in edit.path.name:
        return False
    half = len(edit.ranks) // 2
    moved = [p for p in edit.parts if p.rank < half and chosen(p.name, ".0.")]
    for part in moved:
        part.rank += half
    return bool(moved)


# Files -------------------------------------------------------------------------------------------------------------


def exchange_files(edit: RankDirectory) -> bool:
    """The files of two ranks have each other's names."""
    if len(edit.ranks) < 2:
        return False
    one, other = edit.ranks[0], edit.ranks[-1]
    names = {p.name for p in edit.parts}
    edit.trade(names, one, other)
    return True


def renumber_file(edit: RankDirectory) -> bool:
    """The files of the last rank are called those of a later one."""
    last = edit.ranks[-1]
    for part in edit.on(last):
        part.rank = last + 3
    return True


def lose_file(edit: RankDirectory) -> bool:
    """The files of a rank are missing."""
    rank = edit.choose(edit.ranks[:-1])
    edit.parts = [p for p in edit.parts if p.rank != rank]
    return rank is not None


def copy_file(edit: RankDirectory) -> bool:
    """A rank has the files of another, as if one had been copied twice."""
    if len(edit.ranks) < 2:
        return False
    one, other = edit.ranks[:2]
    copies = [
        type(p)(other, p.number, p.name, p.dtype, list(p.shape), bytearray(p.data), p.place) for p in edit.on(one)
    ]
    edit.parts = [p for p in edit.parts if p.rank != other] + copies
    return True


CAST_KINDS: dict[str, FaultKind] = {
    "a tensor in bf16": cast_to_bf16,
    "a tensor in fp16": cast_to_fp16,
    "a layer in bf16": cast_layer,
    "norms in bf16": cast_norms,
}
VALUE_KINDS: dict[str, FaultKind] = {
    "a bit turned over": flip_a_bit,
    "two rows of a slice exchanged": exchange_rows,
    "the rows of a slice off by one": move_rows,
    "a slice transposed": transpose_values,
    "a slice of zeros": clear_values,
    "a replica that differs": change_replica,
    "values rounded to bf16 or fp8 and back": round_to_bf16,
    "values rounded to fp16 and back": round_to_fp16,
    "the values of two ranks exchanged": exchange_slices,
    "key heads of two ranks exchanged": exchange_values_of_keys,
    "gate_up of two ranks' experts exchanged": exchange_values_of_experts,
    "gate and up exchanged": exchange_gate_and_up,
    "a tensor of two layers exchanged": exchange_layers,
    "scales of two blocks exchanged": take_scales_of_another_block,
    "scales of another layer": take_scales_of_another_layer,
}
HEADER_KINDS: dict[str, FaultKind] = {
    "a tensor missing on one rank": lose_tensor,
    "a tensor missing everywhere": lose_tensor_everywhere,
    "a norm missing on one rank": lose_norm,
    "scales missing on one rank": lose_scales,
    "a tensor too many": add_tensor,
    "a tensor renamed on one rank": rename_on_one_rank,
    "a tensor renamed everywhere": rename_everywhere,
    "the names of two layers exchanged": exchange_names,
    "bytes called another type": change_type,
    **CAST_KINDS,
    "sizes in the other order": reshape_tensor,
}
PLACE_KINDS: dict[str, FaultKind] = {
    "query heads on each other's ranks": trade_queries,
    "key heads on each other's ranks": trade_keys,
    "value heads on each other's ranks": trade_values,
    "fused parts on each other's ranks": trade_fused,
    "gate on each other's ranks": trade_gate,
    "down on each other's ranks": trade_down,
    "the vocabulary on each other's ranks": trade_vocabulary,
    "scales on each other's ranks": trade_scales,
    "latent projections on each other's ranks": trade_latent,
    "a convolution on each other's ranks": trade_convolution,
    "state matrices on each other's ranks": trade_states,
    "all of an expert on another's rank": trade_experts,
    "gate and up of experts on each other's ranks": trade_halves_of_experts,
    "down of experts on each other's ranks": trade_down_of_experts,
    "a slice that says it begins a row earlier": move_places,
    "a cut that is a row off": shift_cut,
    "a fused tensor cut as one": cut_fused_as_one,
    "a layer on the other stage": put_layer_on_another_stage,
    "a norm on the other stage": put_norm_on_another_stage,
    "files of two ranks exchanged": exchange_files,
    "the file of a rank renamed": renumber_file,
    "the file of a rank missing": lose_file,
    "the file of a rank twice": copy_file,
}
PART_KINDS = {**VALUE_KINDS, **HEADER_KINDS, **PLACE_KINDS, **STATE_KINDS}
