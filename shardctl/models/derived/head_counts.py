"""Finds how many heads the attention of a module has: what a config says, as far as the shapes agree."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Final

from shardctl.base.value import state_class, value_class

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_HEAD_COUNT_KEYS: Final = (
    *("num_attention_heads", "n_head", "num_heads", "n_heads", "attention_heads", "encoder_attention_heads"),
    *("decoder_attention_heads", "num_encoder_attention_heads", "num_query_heads"),
)
_KEY_HEADS: Final = (
    *("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads", "kv_n_heads", "multi_query_group_num"),
    *("encoder_num_key_value_heads", "decoder_num_key_value_heads", "num_query_groups"),
)
_HEAD_SIZES: Final = ("head_dim", "attention_head_dim", "d_kv", "kv_channels", "head_size", "attention_head_size")
_VOCABULARY_SIZE_KEYS: Final = (
    *("vocab_size", "n_words", "padded_vocab_size", "src_vocab_size", "tgt_vocab_size", "decoder_vocab_size"),
    *("text_vocab_size", "input_vocab_size", "output_vocab_size"),
)
_KV_SHARING_KEY: Final = "num_kv_shared_layers"
"""The key of a config that says how many of the last layers have no keys and values of their own."""
_SUBMODEL_KEYWORDS: Final = (
    ("vision", "visual", "image", "vit", "pixel"),
    ("audio", "speech", "acoustic", "sound", "mel"),
    ("text", "language", "llm", "lm"),
    ("encoder",),
    ("decoder",),
    ("qformer",),
    ("perceiver", "resampler"),
    ("thinker",),
    ("talker",),
)
"""Words by which names of modules and keys of configs speak of the same part of a model."""


@value_class
class HeadLayout:
    """The heads of one attention."""

    heads: int
    key_heads: int
    """Of keys and values; divides `heads`."""
    size: int
    """Elements of a head of keys, and of queries unless something else is fused with them."""


@value_class
class TowerSizes:
    """What one config says: that of the model, or one within it."""

    words: frozenset[str]
    """Of the keys under which it lies, and of the key that counts its heads."""
    heads: tuple[int, ...]
    """All numbers of heads it mentions, the likeliest first; several where layers differ."""
    key_heads: frozenset[int]
    sizes: tuple[int, ...]
    """Elements of a head, if it says so."""


@state_class
class ConfigSizes:
    """The numbers of a config that decide how tensors are cut."""

    config: Mapping[str, object]
    towers: list[TowerSizes] = field(init=False)
    vocabularies: frozenset[int] = field(init=False)
    shares_keys: bool = field(init=False)
    """Whether some layers take keys and values from others."""

    def __post_init__(self) -> None:
        parts = list(list_parts(self.config))
        self.towers = [tower for words, part in parts for tower in _read_towers(words, part)]
        self.vocabularies = frozenset(
            n
            for _, part in parts
            for key, value in part.items()
            if key in _VOCABULARY_SIZE_KEYS
            for n in _list_numbers(value)
        )
        self.shares_keys = any(any(_list_numbers(part.get(_KV_SHARING_KEY))) for _, part in parts)

    def find_heads(self, path: str, queries: int, keys: int, output: int) -> HeadLayout | None:
        """Find the heads of the attention at `path`, by the rows of queries and keys and the columns of its output.

        None if no config speaks of a number of heads that fits, or two that speak of this module disagree.
        """
        for towers in self._rank_towers(path):
            found = {layout for tower in towers for layout in _fit_tower(tower, queries, keys, output)}
            if len(found) == 1:
                return found.pop()
            if found:
                return None
        return None

    def find_fused_heads(self, path: str, rows: int, output: int) -> HeadLayout | None:
        """Return the heads of an attention whose queries, keys and values are one array of `rows`."""
        for towers in self._rank_towers(path):
            found: set[HeadLayout] = set()
            for tower in towers:
                for heads in tower.heads:
                    size, rest = divmod(output, heads)
                    keys = (rows - output) // 2
                    if rest or (rows - output) % 2 or keys <= 0:
                        continue
                    alike = tower.key_heads or {heads}  # fewer heads of keys than a config speaks of are none
                    fitting = _fit_tower(tower, output, keys, output)
                    found |= {x for x in fitting if x.size == size and x.key_heads in alike}
            if len(found) == 1:
                return found.pop()
            if found:
                return None
        return None

    def count_heads(self, path: str, rows: int, output: int) -> int | None:
        """Find the number of heads alone, for latent attention: sizes differ between queries, keys and values."""
        for towers in self._rank_towers(path):
            for tower in towers:
                for heads in tower.heads:
                    if rows % heads == 0 and output % heads == 0:
                        return heads
        return None

    def _rank_towers(self, path: str) -> Iterator[list[TowerSizes]]:
        """Return the towers in groups, those first whose keys speak of the module as its path does."""
        mine = find_topics(path)
        scored: dict[tuple[int, int], list[TowerSizes]] = {}
        for tower in self.towers:
            theirs = frozenset().union(*map(find_topics, tower.words)) if tower.words else frozenset()
            if mine and theirs and not mine & theirs:
                continue
            scored.setdefault((-len(mine & theirs), len(theirs - mine)), []).append(tower)
        yield from (scored[key] for key in sorted(scored))


def list_parts(
    values: Mapping[str, object], words: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Mapping[str, object]]]:
    """Return a config and all configs within it, each with the keys under which it lies."""
    yield words, values
    for key, value in values.items():
        if isinstance(value, dict) and key not in {"id2label", "label2id", "quantization_config"}:
            yield from list_parts(value, (*words, key))


def _read_towers(words: tuple[str, ...], part: Mapping[str, object]) -> Iterator[TowerSizes]:
    """Return one for each key that counts heads, because encoder and decoder may share a config."""
    sizes = tuple(n for key in _HEAD_SIZES for n in _list_numbers(part.get(key)))
    for key in _HEAD_COUNT_KEYS:
        heads = tuple(dict.fromkeys(_list_numbers(part.get(key))))
        if heads:
            keys = frozenset(n for each in _KEY_HEADS if _speak_alike(key, each) for n in _list_numbers(part.get(each)))
            yield TowerSizes(frozenset((*words, key)), heads, keys, sizes)


def _speak_alike(heads: str, keys: str) -> bool:
    return not find_topics(keys) or find_topics(heads) == find_topics(keys)


def find_topics(text: str) -> frozenset[int]:
    """Find which parts of a model a path or a key speaks of, by number."""
    words = text.lower().replace(".", "_").split("_")
    return frozenset(
        n for n, topic in enumerate(_SUBMODEL_KEYWORDS) if any(w.startswith(t) for w in words for t in topic)
    )


def _fit_tower(tower: TowerSizes, queries: int, keys: int, output: int) -> Iterator[HeadLayout]:
    """Return the layouts that a tower's numbers and the shapes allow."""
    for heads in tower.heads:
        size, rest = divmod(queries, heads)
        if rest or output % heads:
            continue
        if tower.sizes and size not in tower.sizes:
            continue
        count, rest = divmod(keys, size)
        if rest or not count or heads % count or (tower.key_heads and count not in {*tower.key_heads, heads}):
            continue
        yield HeadLayout(heads, count, size)


def _list_numbers(value: object) -> Iterator[int]:
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from _list_numbers(each)
