"""How each method writes a weight and reads it back, as its layout says."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import save_file

from shardctl.models import describe_model

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

Arrays = dict[str, torch.Tensor]
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
    "vocab_size": 96,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 256,
}
"""Large enough that tp=4 cuts no group of 32 and no head."""


@dataclass(frozen=True)
class Codec:
    """One method with its settings."""

    settings: Mapping[str, Any]
    """The `quantization_config`."""
    encode: Callable[[torch.Tensor], Arrays]
    """The arrays of a weight `[out, in]`, by the names that follow the module's."""
    decode: Callable[[Arrays], torch.Tensor]
    """The weight, in float32, that the arrays stand for."""
    skipped: tuple[str, ...] = ("lm_head",)
    """Modules that are left as they are."""


# Integers packed into words ---------------------------------------------------------------------------------------


def pack(values: np.ndarray, bits: int, dim: int) -> np.ndarray:
    """Codes of `bits` as one stream of bits along `dim`, the lowest first, in words of 32.

    AutoGPTQ (auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py, `pack`); also compressed-tensors.
    """
    last = np.moveaxis(values, dim, -1).astype(np.uint8)
    stream = np.unpackbits(last[..., None], axis=-1, bitorder="little")[..., :bits]
    stream = stream.reshape(*last.shape[:-1], -1, 32)
    words = np.packbits(stream, axis=-1, bitorder="little").view("<i4")[..., 0]
    return np.ascontiguousarray(np.moveaxis(words, -1, dim))


def unpack(words: np.ndarray, bits: int, dim: int) -> np.ndarray:
    """The codes that `pack` packed."""
    last = np.ascontiguousarray(np.moveaxis(words, dim, -1))
    stream = np.unpackbits(last[..., None].view(np.uint8), axis=-1, bitorder="little")
    stream = stream.reshape(*last.shape[:-1], -1, bits)
    values = np.packbits(stream, axis=-1, bitorder="little")[..., 0]
    return np.moveaxis(values, -1, dim)


def grouped(weight: torch.Tensor, bits: int, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes `[in, out]`, zeros and scales `[in / group, out]` of a weight `[out, in]`."""
    columns = weight.float().numpy().T
    blocks = columns.reshape(-1, group, columns.shape[1])
    low, high = blocks.min(1), blocks.max(1)
    scales = ((high - low) / (2**bits - 1)).astype(np.float16).astype(np.float32)
    zeros = np.clip(np.round(-low / scales), 1, 2**bits - 1)
    codes = np.clip(np.round(blocks / scales[:, None]) + zeros[:, None], 0, 2**bits - 1)
    return codes.reshape(columns.shape).astype(np.uint8), zeros.astype(np.uint8), scales


def gptq(bits: int, group: int, **more: Any) -> Codec:
    def encode(weight: torch.Tensor) -> Arrays:
        size = group if group > 0 else weight.shape[1]
        codes, zeros, scales = grouped(weight, bits, size)
        return {
            "qweight": torch.from_numpy(pack(codes, bits, 0)),
            "qzeros": torch.from_numpy(pack(zeros - 1, bits, 1)),
            "scales": torch.from_numpy(scales).half(),
            "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // size,
        }

    def decode(arrays: Arrays) -> torch.Tensor:
        codes = unpack(arrays["qweight"].numpy(), bits, 0).astype(np.float32)
        zeros = unpack(arrays["qzeros"].numpy(), bits, 1).astype(np.float32) + 1
        index = (arrays["g_idx"] - arrays["g_idx"].min()).numpy()  # a part counts its groups from its own first one
        scales = arrays["scales"].float().numpy()
        return torch.from_numpy(((codes - zeros[index]) * scales[index]).T.copy())

    return Codec({"quant_method": "gptq", "bits": bits, "group_size": group, **more}, encode, decode)


ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
"""Within a word of AWQ (awq/modules/linear/gemm.py, `WQLinear_GEMM.from_linear`)."""


def interleave(values: np.ndarray) -> np.ndarray:
    return values.reshape(values.shape[0], -1, 8)[..., ORDER].reshape(values.shape)


def deinterleave(values: np.ndarray) -> np.ndarray:
    return values.reshape(values.shape[0], -1, 8)[..., np.argsort(ORDER)].reshape(values.shape)


def awq(group: int) -> Codec:
    def encode(weight: torch.Tensor) -> Arrays:
        codes, zeros, scales = grouped(weight, 4, group)
        return {
            "qweight": torch.from_numpy(pack(interleave(codes), 4, 1)),
            "qzeros": torch.from_numpy(pack(interleave(zeros), 4, 1)),
            "scales": torch.from_numpy(scales).half(),
        }

    def decode(arrays: Arrays) -> torch.Tensor:
        codes = deinterleave(unpack(arrays["qweight"].numpy(), 4, 1)).astype(np.float32)
        zeros = deinterleave(unpack(arrays["qzeros"].numpy(), 4, 1)).astype(np.float32)
        size = codes.shape[0] // zeros.shape[0]
        scales = arrays["scales"].float().numpy()
        return torch.from_numpy(((codes - zeros.repeat(size, 0)) * scales.repeat(size, 0)).T.copy())

    settings = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return Codec(settings, encode, decode)


# fp8 --------------------------------------------------------------------------------------------------------------


def spread(scale: torch.Tensor, shape: torch.Size, block: tuple[int, int]) -> torch.Tensor:
    """A scale per block as one per element."""
    whole = scale.float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return whole[: shape[0], : shape[1]]


def fp8_blocks(rows: int, columns: int, scale_dtype: torch.dtype = torch.float32) -> Codec:
    """As DeepSeek-V3 (inference/kernel.py, `weight_dequant`): blocks at the lower and right edge may be cut short."""

    def encode(weight: torch.Tensor) -> Arrays:
        strips = [strip.split(columns, 1) for strip in weight.float().split(rows, 0)]
        scale = torch.stack([torch.stack([block.abs().max() / 448 for block in strip]) for strip in strips])
        scale = scale.to(scale_dtype)
        codes = (weight.float() / spread(scale, weight.shape, (rows, columns))).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale_inv": scale}

    def decode(arrays: Arrays) -> torch.Tensor:
        codes = arrays["weight"]
        return codes.float() * spread(arrays["weight_scale_inv"], codes.shape, (rows, columns))

    return Codec({"quant_method": "fp8", "weight_block_size": [rows, columns]}, encode, decode)


def fp8_scaled(shape: str, settings: Mapping[str, Any], *, extra: str = "") -> Codec:
    """One scale a tensor (0-d, or `[1]`) or a row."""

    def encode(weight: torch.Tensor) -> Arrays:
        peak = weight.float().abs()
        scale = (peak.amax(1, keepdim=True) if shape == "rows" else peak.max()) / 448
        codes = (weight.float() / scale).to(torch.float8_e4m3fn)
        found = {"weight": codes, "weight_scale": scale.reshape(1) if shape == "[1]" else scale}
        return found | ({extra: torch.tensor(0.5)} if extra else {})

    return Codec(settings, encode, lambda arrays: arrays["weight"].float() * arrays["weight_scale"])


# Four bits of floating point --------------------------------------------------------------------------------------

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def nvfp4_of_modelopt() -> Codec:
    """Two codes a byte, the lower first (vllm/model_executor/layers/quantization/modelopt.py)."""

    def encode(weight: torch.Tensor) -> Arrays:
        blocks = weight.float().reshape(weight.shape[0], -1, 16)
        whole = blocks.abs().max() / (6 * 448)
        scale = (blocks.abs().amax(2) / 6 / whole).to(torch.float8_e4m3fn)
        exact = blocks / (scale.float() * whole)[..., None]
        codes = (exact[..., None] - E2M1).abs().argmin(-1).reshape(weight.shape).to(torch.uint8)
        found = {"weight": codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": scale}
        return found | {"weight_scale_2": whole, "input_scale": torch.tensor(0.5)}

    def decode(arrays: Arrays) -> torch.Tensor:
        words = arrays["weight"]
        codes = torch.stack([words & 15, words >> 4], -1).reshape(words.shape[0], -1)
        scale = arrays["weight_scale"].float() * arrays["weight_scale_2"]
        return E2M1[codes.int()] * scale.repeat_interleave(16, 1)

    settings = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    return Codec(settings, encode, decode)


def mxfp4_of_quark() -> Codec:
    """Two codes a byte, the lower first, with an exponent for each 32 (vLLM, quark/schemes/quark_ocp_mx.py)."""

    def encode(weight: torch.Tensor) -> Arrays:
        blocks = weight.float().reshape(weight.shape[0], -1, 32)
        exponents = (torch.floor(torch.log2(blocks.abs().amax(2))) - 2).clamp(-127, 127)
        exact = blocks / torch.exp2(exponents)[..., None]
        codes = (exact[..., None] - E2M1).abs().argmin(-1).reshape(weight.shape).to(torch.uint8)
        return {"weight": codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": (exponents + 127).to(torch.uint8)}

    def decode(arrays: Arrays) -> torch.Tensor:
        words = arrays["weight"]
        codes = torch.stack([words & 15, words >> 4], -1).reshape(words.shape[0], -1)
        return E2M1[codes.int()] * torch.exp2(arrays["weight_scale"].float() - 127).repeat_interleave(32, 1)

    return Codec(quark("fp4", "per_group", group_size=32, scale_format="e8m0"), encode, decode)


def quark(dtype: str, scheme: str, **more: Any) -> dict[str, Any]:
    """The settings of Quark for all weights but the head."""
    weight = {"dtype": dtype, "qscheme": scheme, "is_dynamic": False, "symmetric": True, **more}
    settings = {"weight": weight, "input_tensors": None, "output_tensors": None, "bias": None}
    export = {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"}
    return {"quant_method": "quark", "global_quant_config": settings, "exclude": ["lm_head"], "export": export}


def autoround(codec: Codec, packing: str) -> Codec:
    """The same arrays, as AutoRound names their method."""
    settings = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "data_type": "int", "sym": False}
    return replace(codec, settings={**settings, "packing_format": packing, "block_name_to_quantize": "model.layers"})


# Checkpoints ------------------------------------------------------------------------------------------------------

CODECS = {
    "fp8-blocks": fp8_blocks(16, 32),
    "fp8-blocks-ue8m0": fp8_blocks(16, 32, torch.float8_e8m0fnu),
    "fp8-tensor": fp8_scaled("", {"quant_method": "fp8", "activation_scheme": "static"}, extra="input_scale"),
    "fp8-tensor-1d": fp8_scaled("[1]", {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    "fbgemm-fp8": fp8_scaled(
        "rows", {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]}, extra="input_scale_ub"
    ),
    "modelopt-fp8": fp8_scaled("", {"quant_method": "modelopt", "quant_algo": "FP8"}, extra="input_scale"),
    "modelopt-nvfp4": nvfp4_of_modelopt(),
    "gptq-4": gptq(4, 32),
    "gptq-8": gptq(8, 32),
    "gptq-3": gptq(3, 32, checkpoint_format="gptq"),
    "gptq-2": gptq(2, 32),
    "gptq-whole": gptq(4, -1, desc_act=True),
    "awq": awq(32),
    "autoround-gptq": autoround(gptq(4, 32), "auto_round:auto_gptq"),
    "autoround-awq": autoround(awq(32), "auto_round:auto_awq"),
    "quark-fp8": fp8_scaled("", quark("fp8_e4m3", "per_tensor"), extra="input_scale"),
    "quark-mxfp4": mxfp4_of_quark(),
}


def plain_state(config: Mapping[str, Any], seed: int = 0) -> Arrays:
    """Random weights of a model, in bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    model = describe_model({key: value for key, value in config.items() if key != "quantization_config"})
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in model.state().items()}


def encoded(codec: Codec, state: Arrays) -> Arrays:
    """A model's weights as the method stores them: every linear one of every layer."""
    found: Arrays = {}
    for name, tensor in state.items():
        module = name.removesuffix(".weight")
        linear = tensor.ndim == 2 and ".layers." in name and module not in codec.skipped
        found |= {f"{module}.{array}": t for array, t in codec.encode(tensor).items()} if linear else {name: tensor}
    return found


def write(path: Path, config: Mapping[str, Any], state: Arrays) -> Path:
    """A checkpoint of one file."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.contiguous() for name, tensor in state.items()}, path / "model.safetensors", {"format": "pt"}
    )
    return path
