"""How compressed-tensors is asked for each of its formats, and for scales that fit."""

from __future__ import annotations

WEIGHTS = {
    "W4A16": {"num_bits": 4, "strategy": "group", "group_size": 32},
    "W4A16-asymmetric": {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False},
    "W4A16-channel": {"num_bits": 4, "strategy": "channel"},
    "W4A16-channel-asymmetric": {"num_bits": 4, "strategy": "channel", "symmetric": False},
    "W8A16": {"num_bits": 8, "strategy": "group", "group_size": 32},
    "W3A16": {"num_bits": 3, "strategy": "group", "group_size": 32},
    "W8A8-int": {"num_bits": 8, "strategy": "channel"},
    "FP8": {"num_bits": 8, "type": "float", "strategy": "tensor"},
    "FP8-channel": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "FP8-block": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 32]},
    "NVFP4": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
    "MXFP4": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
}
ACTIVATIONS = {
    "W8A8-int": {"num_bits": 8, "strategy": "token", "dynamic": True},
    "FP8": {"num_bits": 8, "type": "float", "strategy": "tensor"},
    "FP8-channel": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
    "FP8-block": {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "dynamic": True},
    "NVFP4": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local"},
}


def fill(model):
    """Scales that fit the weights, instead of those a calibration would find."""
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    for module in model.modules():
        args = getattr(getattr(module, "quantization_scheme", None), "weights", None)
        if args is None:
            continue
        weight = module.weight.detach().float()
        rows, columns = weight.shape
        if args.block_structure:
            high, wide = args.block_structure
        else:
            high = rows if args.strategy == "tensor" else 1
            wide = args.group_size or columns
        cut = weight.reshape(rows // high, high, columns // wide, wide)
        low, top, more = cut.amin((1, 3)), cut.amax((1, 3)), {}
        if hasattr(module, "weight_global_scale"):
            module.weight_global_scale.data = generate_gparam(weight.min(), weight.max()).reshape(1)
            more["global_scale"] = module.weight_global_scale
        scale, zero = calculate_qparams(low, top, args, **more)
        module.weight_scale.data = scale.reshape(module.weight_scale.shape).to(module.weight_scale.dtype)
        if hasattr(module, "weight_zero_point"):
            zeros = module.weight_zero_point
            zeros.data = zero.reshape(zeros.shape).to(zeros.dtype)
        for name, parameter in module.named_parameters(recurse=False):
            if name.startswith("input_"):
                parameter.data.fill_(1)
