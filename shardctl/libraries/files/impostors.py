"""Recognises what is not weights in place of weights: pointers, error pages, unfinished downloads."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.libraries.files.file_names import LOADED_SUFFIXES
from shardctl.storage import read_bytes

if TYPE_CHECKING:
    from collections.abc import Collection

    from shardctl.storage import Source

_FILE_HEADER_BYTES: Final = 256
_FETCH_AGAIN_HINT: Final = "fetch the file again"
_PARTIAL_DOWNLOAD_SUFFIXES: Final = (".incomplete", ".aria2", ".part", ".partial", ".crdownload", ".download")
"""What download programs append while they work; `.aria2` stands *beside* a file that already has its full size."""
_UNSUPPORTED_FORMAT_SIGNATURES: Final = (
    (b"GGUF", "a GGUF file"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file (Keras or TensorFlow)"),
    (b"PK\x03\x04", "a zip archive, as torch.save writes"),
    (b"\x80\x02", "a Python pickle, as older versions of torch.save write"),
    (b"\x80\x04", "a Python pickle"),
    (b"\x1f\x8b", "a gzip file"),
    (b"\x28\xb5\x2f\xfd", "a zstd file"),
    (b"<?xml", "an XML document"),
)


def refuse_impostor(source: Source, path: str, expected: str) -> None:
    """Say what the file is, if it is a well-known something else than `expected` (such as ``a safetensors file``).

    Raises:
        SourceError: it is empty, a Git LFS pointer, a web page or another format. Returns if it is none of these.
    """
    size = source.files()[path].size
    if not size:
        raise SourceError(f"{path} is empty", hint=_FETCH_AGAIN_HINT)
    head = read_bytes(source, path, 0, min(size, _FILE_HEADER_BYTES))
    if head.startswith(b"version https://git-lfs.github.com/spec/"):
        raise SourceError(
            f"{path} is a Git LFS pointer, not the weights themselves", hint="run `git lfs pull` in the repository"
        )
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype html", b"<html")):
        raise SourceError(
            f"{path} is a web page saved as weights", hint=f"{_FETCH_AGAIN_HINT}; a gated model needs a token"
        )
    for magic, title in _UNSUPPORTED_FORMAT_SIGNATURES:
        if head.startswith(magic):
            raise SourceError(f"{path} is {title}, not {expected}", hint="give the file the suffix of what it is")
    if not any(head):
        raise SourceError(
            f"{path} begins with {len(head)} zero bytes, so it is not {expected}",
            hint=f"space was reserved for it but it was never filled; {_FETCH_AGAIN_HINT}",
        )


def refuse_unfinished(source: Source, path: str) -> None:
    """Raise SourceError if a download of `path` has not ended."""
    for suffix in _PARTIAL_DOWNLOAD_SUFFIXES:
        if path + suffix in source.files():
            raise SourceError(
                f"{path} is not completely downloaded: {path}{suffix} is still there",
                hint="finish the download, or delete that file if it is a leftover",
            )


def list_unfinished_downloads(source: Source, suffix: str) -> list[str]:
    """List what the root's files that end in `suffix` and are not completely downloaded will be called."""
    return [
        path.removesuffix(ending)
        for path in source.files()
        for ending in _PARTIAL_DOWNLOAD_SUFFIXES
        if "/" not in path and path.endswith(suffix + ending)
    ]


ADAPTERS: Final = ("adapter_model.safetensors", "adapter_model.bin")
"""What peft calls the weights of an adapter."""
TRAINER_FILES: Final = re.compile(
    r"(optimizer|scheduler|scaler|training_args|random_states_[0-9]+|rng_state(_[0-9]+)?|optimizer_[0-9]+"
    r"|extra_state_rank_[0-9]+)"
    r"\.(pt|pth|bin|pkl)|(meta|rng)\.pt"
)
"""What Trainer, accelerate, VeOmni, Lightning and slime keep to resume training (transformers/trainer.py,
accelerate/utils/constants.py, veomni/checkpoint/dcp_checkpointer.py, lightning/fabric/strategies/fsdp.py)."""
ADAPTER_CONFIG: Final = "adapter_config.json"
NEW_EMBEDDINGS: Final = "new_embeddings.safetensors"
"""What vLLM once called the rows of a larger vocabulary beside an adapter (vllm/lora/lora_model.py of 0.10)."""
ADAPTER_PREFIX: Final = "base_model.model."
"""How the names of an adapter's tensors begin."""
LIVE_MATRIX: Final = re.compile(
    r"(?P<module>.+)(?P<part>\.lora_([AB]|embedding_[AB]|magnitude_vector))"
    r"\.(?P<adapter>(?!(weight|bias)$)[^.]+)(?P<rest>\.(weight|bias))?"
)
"""A matrix of an adapter in a model in training, where the adapter's name stands in it; saved by itself it does not."""


def holds_adapter(names: Collection[str]) -> bool:
    """Return whether tensors of these names are those of an adapter that was saved by itself."""
    return bool(names) and all(
        name.startswith(ADAPTER_PREFIX) and LIVE_MATRIX.fullmatch(name) is None for name in names
    )


def find_lone_adapter(source: Source) -> str | None:
    """Find the file of an adapter that is all the weights of the source, with its config; of two, the one for PEFT."""
    adapters, others = _list_weights(source)
    if others or ADAPTER_CONFIG not in source.files():
        return None
    return next((name for name in ADAPTERS if name in adapters), None)


def refuse_adapter(source: Source) -> None:
    """Raise UnsupportedError if the source is a LoRA (or other peft) adapter without its config.

    An adapter with its config is a checkpoint of its own.
    """
    adapters, others = _list_weights(source)
    if adapters and not others and ADAPTER_CONFIG not in source.files():
        raise UnsupportedError(
            f"{source.name} holds an adapter (such as LoRA) without its {ADAPTER_CONFIG}, not a model",
            hint=f"put {ADAPTER_CONFIG} beside it, which alone says its rank, its scaling and its base",
        )


def _list_weights(source: Source) -> tuple[set[str], set[str]]:
    """List the files of an adapter, and the other files of weights."""
    weights = {path for path in source.files() if "/" not in path and path.endswith(LOADED_SUFFIXES)}
    own = list_adapter_files(source)
    return own & {*ADAPTERS}, {path for path in weights - own if TRAINER_FILES.fullmatch(path) is None}


def list_adapter_files(source: Source) -> set[str]:
    """List the files of weights that belong to an adapter in the source, and not to a model beside it."""
    adapters = {*ADAPTERS} & source.files().keys()
    return adapters | ({NEW_EMBEDDINGS} & source.files().keys() if adapters else set())


def warn_of_adapter(source: Source) -> tuple[str, ...]:
    """Warn of an adapter next to a model, which transformers loads together with it.

    transformers 5.24 (integrations/peft.py, `maybe_load_adapters`) takes a directory with `adapter_config.json` for an
    adapter, and if it has a `config.json` as well, for its base.
    """
    if ADAPTER_CONFIG not in source.files():
        return ()
    files = [ADAPTER_CONFIG, *(name for name in ADAPTERS if name in source.files())]
    text = (
        f"{' and '.join(files)} lie next to the model: where peft is installed, transformers applies that adapter to "
        "the weights as well; move the files away if they were merged already"
    )
    return (text,)


FOREIGN: Final = {
    ".gguf": "GGUF (llama.cpp)",
    ".ggml": "GGML (llama.cpp)",
    ".h5": "HDF5 (Keras, TensorFlow)",
    ".keras": "Keras",
    ".msgpack": "msgpack (Flax)",
    ".onnx": "ONNX",
    ".ot": "the Rust bindings of torch",
    ".tflite": "TensorFlow Lite",
    ".pdparams": "PaddlePaddle",
    ".npz": "NumPy archive",
    ".nemo": "NeMo archive",
    ".ckpt": "ckpt (TensorFlow or Lightning)",
    ".engine": "TensorRT engine",
    ".mlmodel": "Core ML",
}
"""Suffixes of containers that shardctl knows by name and does not convert."""
_HINTS_BY_SUFFIX: Final = {
    ".gguf": "inspect and plan describe it, given the file itself; to convert, give the model's safetensors files",
    ".ckpt": "a checkpoint of Lightning is read if its file is given instead of the directory, such as run/last.ckpt",
}


_NANOTRON_FILE_PATTERN: Final = re.compile(
    r"(.+/)?pp_block/(.+/)?model_(weight|bias)(_pp-rank-[0-9]+-of-[0-9]+_.*)?\.safetensors"
)
"""A parameter of nanotron, in the folders of its modules (`nanotron/serialize/weights.py`)."""


def refuse_foreign(source: Source) -> None:
    """Raise UnsupportedError if the source's own files are a checkpoint of a container that shardctl does not read."""
    for path in source.files():
        suffix = path[path.rfind(".") :].lower() if "." in path else ""
        if "/" not in path and suffix in FOREIGN:
            raise UnsupportedError(
                f"{path} is a checkpoint in the format {FOREIGN[suffix]}, which shardctl does not convert",
                hint=_HINTS_BY_SUFFIX.get(
                    suffix, "give the model's safetensors or torch files; most repositories hold them too"
                ),
            )
    if any(map(_NANOTRON_FILE_PATTERN.fullmatch, source.files())):
        raise UnsupportedError(
            f"{source.name} is a checkpoint of nanotron, one file for each parameter and rank, which shardctl does not "
            "convert",
            hint="convert it with nanotron's examples/llama/convert_nanotron_to_hf.py, and give the result",
        )
