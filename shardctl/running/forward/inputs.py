"""Makes inputs for a model: seeded token ids in its vocabulary, or pixels or sounds of the right size."""

from __future__ import annotations

import copy
import inspect
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shardctl.base.errors import UnsupportedError
from shardctl.verify.golden import GoldenInput

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

Torch = Any
SEED: Final = 20_240_229
BATCH, LENGTH = 2, 32
_CONTEXT_LENGTH_KEYS: Final = ("max_position_embeddings", "n_positions", "max_target_positions", "seq_length")
_SPARE_POSITION_COUNT: Final = 4
"""Positions that are not used: some models begin to count after the padding token."""


def build_inputs(model: Torch, device: str, seq_len: int | None = None) -> dict[str, Torch]:
    """Build arguments of the model's forward, with sequences of `seq_len` tokens, by default 32.

    Raises UnsupportedError if it wants something else than tokens or pixels.
    """
    import torch

    generator = torch.Generator().manual_seed(SEED)
    config, names = model.config, set(inspect.signature(model.forward).parameters)
    main = getattr(model, "main_input_name", "input_ids")
    given: dict[str, Torch] = {}
    text = _find_text_config(config)
    both = {"input_ids", "pixel_values"} <= names and hasattr(config, "vision_config")
    if main == "input_ids" or "input_ids" in names:
        given["input_ids"] = _draw_token_ids(text, config, generator, seq_len)
    if main == "pixel_values" or (both and not hasattr(config, "image_token_id") and not _has_image_token(config)):
        given["pixel_values"] = _draw_pixels(config, generator)
    if main == "input_features" and hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions"):
        given["input_features"] = _draw_sounds(config, generator)
    if "input_features" in names and hasattr(config, "audio_length_per_tok"):  # Voxtral Realtime hears all the time
        moments = given["input_ids"].shape[1] * int(config.audio_length_per_tok)
        size = (BATCH, int(config.audio_config.num_mel_bins), moments)
        given["input_features"] = torch.randn(size, generator=generator)
    if "cross_attention_states" in names:  # of Llama 3.2 Vision: what is made of a picture
        size = (BATCH, LENGTH, int(text.hidden_size))
        given["cross_attention_states"] = torch.randn(size, generator=generator)
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in names:
        given["decoder_input_ids"] = _draw_token_ids(text, config, generator, seq_len)
    if not given:
        raise UnsupportedError(f"{type(model).__name__} needs {main}, which shardctl cannot generate")
    return {name: tensor.to(device) for name, tensor in given.items()}


def _find_text_config(config: Torch) -> Torch:
    """Find the config of the text model; raises UnsupportedError if there are several."""
    try:
        return config.get_text_config() if hasattr(config, "get_text_config") else config
    except ValueError as error:  # transformers cannot tell which of them is meant
        raise UnsupportedError(
            f"{type(config).__name__} has several text models, so shardctl cannot tell whose tokens to generate"
        ) from error


def list_towers(model: Torch, idle: Collection[str], device: str) -> Iterator[tuple[str, Torch, dict[str, Torch]]]:
    """List models within the model that see or hear and contain `idle` parts, each with its name and inputs."""
    import torch

    generator, taken = torch.Generator().manual_seed(SEED), list[str]()
    for name, module in model.named_modules():
        inside = any(part.startswith(f"{name}.") for part in idle) and not any(name.startswith(t) for t in taken)
        if not name or not inside or not hasattr(module, "main_input_name"):
            continue
        names = set(inspect.signature(module.forward).parameters)
        if "pixel_values" in names and "input_ids" not in names and hasattr(module.config, "image_size"):
            given = {"pixel_values": _draw_pixels(module.config, generator)}
            if "image_sizes" in names:
                given["image_sizes"] = torch.tensor([given["pixel_values"].shape[-2:]] * BATCH)
            if "aspect_ratio_ids" in names:
                given |= _cut_into_tiles(given["pixel_values"], int(module.config.max_num_tiles))
        elif _hears(module, names):
            given = {"input_features": _draw_sounds(module.config, generator)}
        elif {"hidden_states", "grid_thw"} <= names:
            given = _draw_patches(module.config, generator)
        else:
            continue
        taken.append(f"{name}.")
        yield name, module, {key: tensor.to(device) for key, tensor in given.items()}


def _hears(module: Torch, names: Collection[str]) -> bool:
    """Return whether a module takes sounds of one length, as Whisper's encoder does, and needs nothing else."""
    needed = [p for p in inspect.signature(module.forward).parameters.values() if p.default is p.empty]
    sized = hasattr(module.config, "num_mel_bins") and hasattr(module.config, "max_source_positions")
    return (
        sized
        and "input_ids" not in names
        and [p.name for p in needed if p.kind < p.VAR_POSITIONAL] == ["input_features"]
    )


def _draw_sounds(config: Torch, generator: Torch) -> Torch:
    """Draw sounds that are as long as Whisper's encoder takes them."""
    import torch

    size = (BATCH, int(config.num_mel_bins), 2 * int(config.max_source_positions))
    return torch.randn(size, generator=generator)


def _draw_patches(vision: Torch, generator: Torch) -> dict[str, Torch]:
    """Draw pictures of two by two merged patches, as the vision part of Qwen2-VL takes them."""
    import torch

    side = 2 * int(vision.spatial_merge_size)
    size = int(vision.in_channels) * int(getattr(vision, "temporal_patch_size", 1)) * int(vision.patch_size) ** 2
    grid = torch.tensor([[1, side, side]] * BATCH)
    return {"hidden_states": torch.randn((BATCH * side * side, size), generator=generator), "grid_thw": grid}


def _cut_into_tiles(pixels: Torch, tiles: int) -> dict[str, Torch]:
    """Make pictures of as many tiles as can be, as Llama 3.2 Vision takes them; each tile is the same."""
    import torch

    return {
        "pixel_values": pixels[:, None, None].repeat(1, 1, tiles, 1, 1, 1),
        "aspect_ratio_ids": torch.ones((BATCH, 1), dtype=torch.long),
        "aspect_ratio_mask": torch.ones((BATCH, 1, tiles), dtype=torch.long),
    }


def _has_image_token(config: Torch) -> bool:
    return any(hasattr(config, name) for name in ("image_token_index", "image_token_id"))


def _draw_token_ids(text: Torch, config: Torch, generator: Torch, seq_len: int | None) -> Torch:
    """Draw token ids that mean nothing special.

    Raises UnsupportedError if the model has not as many positions as are wanted.
    """
    import torch

    if not isinstance(getattr(text, "vocab_size", None), int):
        raise UnsupportedError(f"{type(config).__name__} has no vocab_size, so that no tokens can be made up")
    vocabulary = min(int(text.vocab_size), int(getattr(config, "decoder_vocab_size", None) or text.vocab_size))
    special = set(
        _list_integers(
            getattr(each, name, None) for each in (text, config) for name in dir(each) if _is_special_token(name)
        )
    )
    usual = torch.tensor([token for token in range(vocabulary) if token not in special] or range(vocabulary))
    found = _count_config_positions(text)
    if seq_len is not None and seq_len > found:
        raise UnsupportedError(f"sequences of {seq_len:,} tokens are too long: the model has {found:,} positions")
    length = seq_len or max(min(LENGTH, found), 2)
    return usual[torch.randint(len(usual), (BATCH, length), generator=generator)]


def count_positions(model: Torch) -> int:
    """Count the positions that a model has for a sequence; very many if its config does not say."""
    return _count_config_positions(_find_text_config(model.config))


def _count_config_positions(text: Torch) -> int:
    found = [getattr(text, name) for name in _CONTEXT_LENGTH_KEYS if isinstance(getattr(text, name, None), int)]
    return min((limit - _SPARE_POSITION_COUNT for limit in found), default=1 << 40)


def list_position_limits(model: Torch) -> Iterator[tuple[str, int]]:
    """List positions beyond which a model computes otherwise: its sliding window, and the length it was trained for."""
    text = _find_text_config(model.config)
    window = getattr(text, "sliding_window", None)
    if isinstance(window, int) and not isinstance(window, bool) and getattr(text, "use_sliding_window", True):
        yield "the end of the sliding window of", window
    scaling = getattr(text, "rope_parameters", None)
    if isinstance(scaling, MutableMapping):
        kinds = [scaling, *(each for each in scaling.values() if isinstance(each, MutableMapping))]
        found = [each.get("original_max_position_embeddings") for each in kinds]
        lengths = [each for each in found if isinstance(each, int)]
        if lengths:
            yield "positions that rotary embeddings scale, beyond", max(lengths)


def _is_special_token(name: str) -> bool:
    return name.endswith(("_token_id", "_token_index"))


def _list_integers(values: Iterable[object]) -> list[int]:
    found: list[int] = []
    for value in values:
        found += (
            [value]
            if isinstance(value, int)
            else [v for v in value if isinstance(v, int)]
            if isinstance(value, list)
            else []
        )
    return found


def _draw_pixels(config: Torch, generator: Torch) -> Torch:
    import torch

    places = (getattr(config, "vision_config", None), getattr(config, "encoder", None), config)
    vision: Torch = next((each for each in places if hasattr(each, "image_size")), None)
    if vision is None:
        raise UnsupportedError(f"{type(config).__name__} has no image_size, so shardctl cannot generate pictures")
    size = vision.image_size
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    return torch.randn((BATCH, int(getattr(vision, "num_channels", 3)), height, width), generator=generator)


def copy_arguments(value: Torch) -> Torch:
    """Return the same arguments with tensors and caches of their own: some blocks write into what they are given."""
    import torch
    from transformers.cache_utils import Cache

    if isinstance(value, torch.Tensor):
        return value.clone()
    if type(value) in {tuple, list}:
        return type(value)(map(copy_arguments, value))
    if isinstance(value, MutableMapping) and type(value).__module__ != "torch":
        mine = copy.copy(value)  # of its own type: layers hand keys and values on in such
        for key, each in value.items():
            mine[key] = copy_arguments(each)
        return mine
    return copy.deepcopy(value) if isinstance(value, Cache) else value


def move_arguments(value: Torch, device: str) -> Torch:
    """Return the same arguments on a device.

    Lists and mappings stay the same objects, because layers write into them what later layers read.
    """
    import torch

    if isinstance(value, torch.Tensor):
        return value.to(device)
    if type(value) is tuple:
        return tuple(move_arguments(each, device) for each in value)
    if type(value) is list:
        value[:] = [move_arguments(each, device) for each in value]
    elif isinstance(value, MutableMapping) and type(value).__module__ != "torch":
        for key, each in value.items():
            value[key] = move_arguments(each, device)
    return value


def encode_inputs(inputs: Mapping[str, Torch]) -> dict[str, GoldenInput]:
    """Encode the arguments of a forward pass for a golden file."""
    found = {}
    for name, tensor in inputs.items():
        array = (tensor.float() if tensor.is_floating_point() else tensor).cpu().contiguous().numpy()
        data = array.astype(array.dtype.newbyteorder("<")).tobytes()
        found[name] = GoldenInput.of(array.dtype.name, array.shape, data)
    return found


def decode_inputs(inputs: Mapping[str, GoldenInput], device: str) -> dict[str, Torch]:
    """Decode the arguments of a forward pass from a golden file."""
    import torch

    found = {}
    for name, one in inputs.items():
        array = np.frombuffer(one.decode(), np.dtype(one.dtype).newbyteorder("<")).reshape(one.shape)
        found[name] = torch.from_numpy(array.astype(one.dtype)).to(device)
    return found
