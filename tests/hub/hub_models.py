"""Tiny models as files by path."""

import json

import numpy as np
from hub_server import Sparse
from safetensors.numpy import save

from shardctl.models import describe_model

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float32",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "vocab_size": 512,
}


LARGE = {
    **CONFIG,
    "dtype": "bfloat16",
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_attention_heads": 128,
    "num_hidden_layers": 126,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
"""The shapes of Llama 3.1 405B."""
SHARDS = 200


def large(shards=SHARDS, *, hashed=False, **changes):
    """A repository of 812 GB in 200 shards: headers are real, elements are zeros that nobody stores."""
    config = {**LARGE, **changes}
    tensors = list(describe_model(config).own())
    parts = [tensors[i * len(tensors) // shards : (i + 1) * len(tensors) // shards] for i in range(shards)]
    files, weight_map = {}, {}
    for number, shard in enumerate(parts, 1):
        path = f"model-{number:05}-of-{shards:05}.safetensors"
        header, end = {"__metadata__": {"format": "pt"}}, 0
        for tensor in shard:
            size = int(np.prod(tensor.shape)) * 2
            header[tensor.name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [end, end + size]}
            weight_map[tensor.name], end = path, end + size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        files[path] = Sparse(len(text).to_bytes(8, "little") + text, 8 + len(text) + end, hashed=hashed)
    index = {"metadata": {}, "weight_map": weight_map}
    files["model.safetensors.index.json"] = json.dumps(index).encode()
    files["config.json"] = json.dumps(config).encode()
    return files


def model(shards=3, seed=7, **changes):
    """A tiny Llama as files by path: shards with an index, a config, a tokenizer and a page."""
    config = {**CONFIG, **changes}
    random = np.random.default_rng(seed)
    tensors = {t.name: random.standard_normal(t.shape, np.float32) for t in describe_model(config).own()}
    names = sorted(tensors)
    parts = [names[i::shards] for i in range(shards)]
    paths = [f"model-{i:05}-of-{shards:05}.safetensors" for i in range(1, shards + 1)]
    files = {
        path: save({name: tensors[name] for name in part}, {"format": "pt"})
        for path, part in zip(paths, parts, strict=True)
    }
    weight_map = {name: path for path, part in zip(paths, parts, strict=True) for name in part}
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    files["model.safetensors.index.json"] = json.dumps(index).encode()
    files["config.json"] = json.dumps(config).encode()
    files["tokenizer.json"] = b"{}"
    files["README.md"] = b"---\nlicense: apache-2.0\n---\n"
    files["1_Pooling/config.json"] = b"{}"
    return files


def write(files, folder):
    """The same files in a directory."""
    for path, content in files.items():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
    return folder


def content(folder):
    """Every file below a directory, but for the record, which says where the source was."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "shardctl.json"
    }
