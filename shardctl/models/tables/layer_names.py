"""Counts layers by their names, and says what precedes and what follows them: all that pipeline stages need to know.

>>> places = count_layers({"wte": (9, 4), "h.0.up": (8, 4), "h.0.down": (4, 8), "h.1.up": (8, 4), "norm": (4,)})
>>> str(places), places.find_stage("h.1.up"), places.find_stage("norm")
('2 of h.*', ('layer', 1), ('last', 0))
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, Literal

from shardctl.base.value import value_class

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardctl.tensors.placement import Where

_NUMBERED_COMPONENT_PATTERN: Final = re.compile(r"(.*_)?(\d+)")
"""A part of a name that counts: `3` in `layers.3`, and `layers_3`."""
_MIN_MATRICES_PER_LAYER: Final = 3
"""A layer has at least so many, where any has; a projector, a merger or a head, of which lists exist, has fewer."""
_MATRIX_NDIM: Final = 2
_PARAMETER_SUFFIXES: Final = (".weight", ".bias", ".qweight", ".qzeros", ".scales", ".weight_scale", ".weight_packed")
_COMPUTE_ORDER_KEYWORDS: Final = (
    (5, "vocoder token2wav codec"),
    (4, "talker t2u mtp nextn draft depth flow diffusion postnet"),
    (3, "decoder"),
    (0, "vision visual image img pixel vit sam video audio speech sound acoustic perception"),
    (1, "encoder"),
)
"""When a module computes, by the words of its name: the first line that has one of them counts."""
_DEFAULT_COMPUTE_ORDER: Final = 2
"""That of a module without such words. In a model with a decoder or an encoder there is none."""
_Side = Literal["before", "after", ""]
_BEFORE_AFTER_KEYWORDS: Final[Mapping[_Side, str]] = {
    "before": "cls_token class_token embed embeds embedder embedding embeddings emb wte wpe word token tokens tok pos "
    "position positions positional patch patcher pre prenet stem rotary inv in input inputs shared conv subsampling "
    "projector connector aligner adapter resampler",
    "after": "embed_out norm layernorm ln head heads lm score scorer classifier classification predictions logits "
    "pooler post postnet final last out output outputs cls generator decoder unembed unembedding merger readout",
}
_SIDE_OF: Final[Mapping[str, _Side]] = {
    word: side for side, words in _BEFORE_AFTER_KEYWORDS.items() for word in words.split()
}
"""By a part of a name, or a word of one: whether it precedes layers or follows them."""
_Members = dict[str, int]
"""The names in a numbered list, each with its number there."""


@value_class
class LayerTower:
    """Layers that follow each other, and have one name but for their number."""

    patterns: tuple[str, ...]
    """The names with `*` for the number; several where lists beside each other are parts of the same layers (XLM)."""
    numbers: tuple[int, ...]
    """In order; a checkpoint may lack some."""
    first: int
    """The pipeline layer that the first of them is."""

    @property
    def last(self) -> int:
        """The pipeline layer that the last of them is."""
        return self.first + len(self.numbers) - 1

    def __str__(self) -> str:
        return f"{len(self.numbers)} of {self.patterns[0]}"


@value_class
class LayerPlaces:
    """Where the tensors of a checkpoint stand in the order of computation, as far as their names say."""

    towers: tuple[LayerTower, ...]
    """In the order of computation: what sees or hears, encoders, the rest; else as the file has them."""
    inside: Mapping[str, int]
    """The pipeline layer of each tensor that is in one, by name."""

    @property
    def layers(self) -> int:
        """Pipeline layers of all towers together."""
        return sum(len(tower.numbers) for tower in self.towers)

    def __str__(self) -> str:
        return ", then ".join(map(str, self.towers)) or "none"

    def find_stage(self, name: str) -> tuple[Where, int]:
        """Find the stage of a tensor: its layer's, or that of the layer that it precedes or follows."""
        if name in self.inside:
            return ("layer", self.inside[name])
        tower = self._find_tower(name)
        if _find_side(name) == "after":
            return ("last", 0) if tower is None or tower is self.towers[-1] else ("layer", tower.last)
        return ("first", 0) if tower is None or tower is self.towers[0] else ("layer", tower.first)

    def is_undecided(self, name: str) -> bool:
        """Return whether a name does not say if the tensor precedes or follows layers; it is taken to precede them."""
        return name not in self.inside and not _find_side(name)

    def _find_tower(self, name: str) -> LayerTower | None:
        """Find the tower that a tensor outside of layers belongs to: that within the deepest module that has both."""
        shared = [_count_shared_words(name, tower.patterns[0]) for tower in self.towers]
        near = [tower for tower, depth in zip(self.towers, shared, strict=True) if depth == max(shared)]
        if len(near) > 1:  # a child of the module whose child is the list itself
            near = [tower for tower in near if len(_name_owner(tower.patterns[0]).split(".")) == max(shared)]
        return near[0] if len(near) == 1 else None


def count_layers(shapes: Mapping[str, Sequence[int]]) -> LayerPlaces:
    """Find the layers of a model whose tensors have these names and shapes."""
    for least in range(_MIN_MATRICES_PER_LAYER, 0, -1):
        stacks, others = _find_stacks(shapes, least)
        if stacks:
            break
    towers: list[LayerTower] = []
    inside: dict[str, int] = {}
    for pattern, members in sorted(stacks.items(), key=lambda item: _rank_tower(item[0])):
        numbers, first = sorted(set(members.values())), towers[-1].last + 1 if towers else 0
        joined = {pattern: members} | {
            other: also
            for other, also in others.items()
            if _name_owner(other) == _name_owner(pattern) and set(also.values()) == set(numbers) and _may_be_part(other)
        }
        place = {number: first + n for n, number in enumerate(numbers)}
        inside |= {name: place[number] for also in joined.values() for name, number in also.items()}
        towers.append(LayerTower(tuple(joined), tuple(numbers), first))
    return LayerPlaces(tuple(towers), inside)


def _find_stacks(shapes: Mapping[str, Sequence[int]], least: int) -> tuple[dict[str, _Members], dict[str, _Members]]:
    """Find the outermost numbered lists, by pattern, of whose elements some have `least` matrices; and other lists."""
    stacks: dict[str, _Members] = {}
    others: dict[str, _Members] = {}
    pending = {
        name: [n for n, part in enumerate(name.split(".")) if _NUMBERED_COMPONENT_PATTERN.fullmatch(part)]
        for name in shapes
    }
    while pending:
        lists: dict[str, _Members] = {}
        for name, places in pending.items():
            if places:
                pattern, number = _split_number(name, places[0])
                lists.setdefault(pattern, {})[name] = number
        inner = {}
        for pattern, members in lists.items():
            counts = pattern.endswith(".*") or pattern == "*" or len(set(members.values())) > 1  # attn_1 may be alone
            if counts and _count_matrices(members, shapes) >= least:
                stacks[pattern] = members
            else:
                others[pattern] = members
                inner.update({name: pending[name][1:] for name in members})
        pending = inner
    return stacks, others


def _may_be_part(pattern: str) -> bool:
    """Return whether a list that counts as layers beside it do may be a part of them.

    One of embeddings or heads is not.
    """
    return _find_side(pattern) != "before" and "head" not in pattern


def _split_number(name: str, place: int) -> tuple[str, int]:
    """Return the list that the part at `place` of a name counts in, with `*` for the number, and the number.

    >>> _split_number("h.3.up.weight", 1), _split_number("block_3.up", 0)
    (('h.*', 3), ('block_*', 3))
    """
    parts = name.split(".")[: place + 1]
    digits = parts[-1].rpartition("_")[2]
    return ".".join([*parts[:-1], f"{parts[-1].removesuffix(digits)}*"]), int(digits)


def _count_matrices(members: _Members, shapes: Mapping[str, Sequence[int]]) -> int:
    """Count the most modules that any element of a list has which have a matrix."""
    modules: dict[int, set[str]] = {}
    for name, number in members.items():
        if len(shapes[name]) >= _MATRIX_NDIM:
            modules.setdefault(number, set()).add(_name_module(name) if name.endswith(_PARAMETER_SUFFIXES) else name)
    return max(map(len, modules.values()), default=0)


def _name_module(name: str) -> str:
    return name.rpartition(".")[0]


def _name_owner(pattern: str) -> str:
    """Return the module that has a list.

    >>> _name_owner("model.layers.*"), _name_owner("encoder.layers_*")
    ('model', 'encoder')
    """
    return _name_module(pattern.removesuffix(".*"))


def _count_shared_words(one: str, other: str) -> int:
    """Count how many leading parts two names have in common."""
    pairs = enumerate(zip(one.split("."), other.split("."), strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(one.count("."), other.count(".")) + 1)


def _rank_tower(pattern: str) -> tuple[int, ...]:
    """When a list of layers computes, compared with others; see `_COMPUTE_ORDER_KEYWORDS`."""
    roles = []
    for part in pattern.split("."):
        words = set(part.lower().split("_"))
        roles += [role for role, known in _COMPUTE_ORDER_KEYWORDS if not words.isdisjoint(known.split())][:1]
    return tuple(roles) or (_DEFAULT_COMPUTE_ORDER,)


def _find_side(name: str) -> _Side:
    """Return whether a tensor outside of layers precedes them or follows them, by the first of its words that says so.

    >>> [_find_side(n) for n in ("model.embed_norm.weight", "model.norm.weight", "lm_head.embedding", "gadget.w1")]
    ['before', 'after', 'after', '']
    """
    for part in name.lower().split("."):
        for word in (part, *re.findall("[a-z]+", part)):
            if word in _SIDE_OF:
                return _SIDE_OF[word]
    return ""
