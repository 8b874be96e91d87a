"""Compares auxiliary files of two checkpoints, and says which loaders read or run: tokenizers, settings, code."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError
from shardctl.libraries.files.file_names import WEIGHT_SUFFIXES
from shardctl.storage.bounded_text import CONFIG_TEXT, RECORD_TEXT, parse_json, read_text

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from shardctl.storage import Source

_COMPARE_BLOCK_BYTES: Final = 1 << 20
_WRITER_KEYS: Final = ("transformers_version", "_from_model_config", "_commit_hash")
_DOCUMENT_SUFFIXES: Final = frozenset({".md", ".png", ".jpg", ".jpeg", ".gif", ".svg", ".pdf", ".ipynb"})
AUTO_MAP: Final = "auto_map"
"""The key of configs and of settings of tokenizers that names classes in files of code, or in another repository."""
_REQUIRED_FILE_NAMES: Final = frozenset(
    {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"}
)
"""Files without which a model answers otherwise, or not at all, and for which no other file stands."""
_LOADER_FILE_NAMES: Final = frozenset(
    {
        *("config.json", "generation_config.json", "adapter_config.json", "model_index.json", "params.json"),
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
        *("chat_template.json", "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
        *(
            "audio_tokenizer_config.json",
            "vocab.json",
            "vocab.txt",
            "merges.txt",
            "bpe.codes",
            "dict.txt",
            "emoji.json",
        ),
        *("normalizer.json", "byte_maps.json", "entity_vocab.json", "tekken.json", "vocab-src.json", "vocab-tgt.json"),
        *("target_vocab.json", "word_shape.json", "word_pronunciation.json", "scheduler_config.json"),
        *("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"),
    }
)
"""Files that loaders read by their names (transformers 5.24, `utils/__init__.py` and `VOCAB_FILES_NAMES` of its
tokenizers; diffusers; sentence-transformers; vLLM and Mistral for `params.json` and `tekken.json`)."""
_READ_SUFFIXES: Final = (".jinja", ".model", ".spm", ".tiktoken", *WEIGHT_SUFFIXES)
"""Templates, which are programs of their own; vocabularies; and the weights of modules in folders."""
_CODE_SUFFIX: Final = ".py"


def is_document(path: str) -> bool:
    """Return whether a file is for people alone, so that no program reads it.

    >>> [is_document(path) for path in ("README.md", "LICENSE.txt", ".gitattributes", "merges.txt")]
    [True, True, True, False]
    """
    name = PurePosixPath(path)
    return (
        name.suffix.lower() in _DOCUMENT_SUFFIXES
        or name.name == ".gitattributes"
        or name.stem.upper().startswith(("README", "LICENSE", "NOTICE", "COPYING", "USE_POLICY"))
    )


def is_code(path: str) -> bool:
    """Return whether a file is code, which transformers runs with `trust_remote_code`."""
    return path.lower().endswith(_CODE_SUFFIX)


def is_read_by_loaders(path: str) -> bool:
    """Return whether a loader reads or runs a file because of its name.

    >>> [is_read_by_loaders(path) for path in ("modeling_x.py", "1_Pooling/config.json", "a.jinja", "results.json")]
    [True, True, True, False]
    """
    name = PurePosixPath(path).name
    return is_code(path) or name in _LOADER_FILE_NAMES or name.lower().endswith(_READ_SUFFIXES)


def describe_loading(path: str) -> str:
    """Describe what a loader does with a file that is too many, as the end of a sentence; empty for nothing."""
    if is_code(path):
        return ", and transformers runs it with trust_remote_code"
    return ", and loaders read it" if is_read_by_loaders(path) else ""


def is_needed(path: str) -> bool:
    """Return whether a checkpoint of which the source has this file is not whole without it."""
    return path in _REQUIRED_FILE_NAMES or is_code(path)


def list_code_references(settings: Mapping[str, object], place: str = "") -> Iterator[tuple[str, object]]:
    """List every `auto_map` of a config and of those inside it, each with its path."""
    for key, value in settings.items():
        if key == AUTO_MAP and value:
            yield f"{place}{key}", value
        elif isinstance(value, dict):
            yield from list_code_references(value, f"{place}{key}.")


def names_code(path: str, source: Source) -> bool:
    """Return whether a JSON file of a source names classes in files of code; one that is no JSON names none."""
    if not path.endswith(".json"):
        return False
    try:
        found = parse_json(read_text(source, path, CONFIG_TEXT), path, CONFIG_TEXT)
    except SourceError:
        return False
    return isinstance(found, dict) and any(True for _ in list_code_references(found))


def has_same_content(path: str, a: Source, b: Source, other: str = "", *, but: Collection[str] = ()) -> bool:
    """Return whether a file says the same in two sources: every byte, or in JSON every value.

    `other` is its path in the second, if that is not the same. Who wrote a JSON file does not count, nor do the keys
    `but`. Raises SourceError for a file that cannot be read.
    """
    sides = ((path, a), (other or path, b))
    if _has_same_bytes(*sides[0], *sides[1]):
        return True
    if not path.endswith(".json"):
        return False
    try:
        ours, theirs = (parse_json(read_text(each, name, RECORD_TEXT), name, RECORD_TEXT) for name, each in sides)
    except SourceError:
        return False
    for each in (ours, theirs):
        if isinstance(each, dict):
            for key in (*_WRITER_KEYS, *but):
                each.pop(key, None)
    return bool(ours == theirs)


def _has_same_bytes(path: str, a: Source, other: str, b: Source) -> bool:
    size = a.files()[path].size
    if b.files()[other].size != size:
        return False
    for offset in range(0, size, _COMPARE_BLOCK_BYTES):
        length = min(_COMPARE_BLOCK_BYTES, size - offset)
        ours, theirs = bytearray(length), bytearray(length)
        a.read_at(path, offset, memoryview(ours))
        b.read_at(other, offset, memoryview(theirs))
        if ours != theirs:
            return False
    return True
