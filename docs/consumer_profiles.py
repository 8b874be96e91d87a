"""Writes the profiles of consumers, shardctl/libraries/consumers/*.json, from the source code of each consumer.

    python docs/consumer_profiles.py vllm SITE_PACKAGES             # where vllm is installed or unpacked
    python docs/consumer_profiles.py sglang FOLDER                  # the unpacked wheel
    python docs/consumer_profiles.py transformers SITE_PACKAGES
    python docs/consumer_profiles.py tgi SERVER --version 3.3.7     # the folder `server` of its repository
    python docs/consumer_profiles.py llama.cpp CONVERSION --version b1   # the folder `conversion` of its repository

The program parses source files and imports none of them. `shardctl/libraries/consumers/profile.py` says what the
fields mean.
"""

import argparse
import ast
import json
import re
from importlib.metadata import Distribution
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "shardctl/libraries/consumers"
_VLLM_TABLES = re.compile(r"_(\w+_MODELS)$")
_VLLM_NOT_SERVED = {"PREVIOUSLY_SUPPORTED_MODELS", "OOT_SUPPORTED_MODELS", "VLLM_MODELS", "TRANSFORMERS_BACKEND_MODELS"}


def parse(path):
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def assigned(tree):
    """Every name that a module assigns at its top level, with the assigned node."""
    for node in tree.body:
        if isinstance(node, ast.Assign):
            yield from ((target.id, node.value) for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            yield node.target.id, node.value


def text_keys(node):
    """The keys of a dict display that are texts."""
    return [key.value for key in node.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]


def version_of(folder, package):
    """The version of an installed or unpacked package."""
    found = [*folder.glob(f"{package}-*.dist-info"), *folder.glob(f"{package}_cpu-*.dist-info")]
    return Distribution.at(found[0]).version


def methods_that_mention(folder, word):
    """The quantization modules, by file, that mention a class."""
    return [path for path in sorted(folder.rglob("*.py")) if word in path.read_text(encoding="utf-8")]


def backend_classes(folder):
    """The classes of an installed transformers that an engine can run with an attention of its own."""
    found = set()
    for path in sorted((folder / "transformers/models").rglob("modeling_*.py")):
        text = path.read_text(encoding="utf-8")
        if "_supports_attention_backend = True" in text:
            found |= set(re.findall(r"^class (\w+For(?:CausalLM|ConditionalGeneration))\(", text, re.MULTILINE))
    return found


def vllm(folder):
    """The profile of vLLM: its registry, and the methods of its quantization package."""
    root = folder / "vllm/model_executor"
    tables = {
        name.lstrip("_"): value
        for name, value in assigned(parse(root / "models/registry.py"))
        if _VLLM_TABLES.match(name) and isinstance(value, ast.Dict)
    }
    served = {key for name, value in tables.items() if name not in _VLLM_NOT_SERVED for key in text_keys(value)}
    removed = {
        key.value: value.value
        for key, value in zip(
            tables["PREVIOUSLY_SUPPORTED_MODELS"].keys, tables["PREVIOUSLY_SUPPORTED_MODELS"].values, strict=True
        )
    }
    methods = next(
        value
        for name, value in assigned(parse(root / "layers/quantization/__init__.py"))
        if name == "QuantizationMethods"
    )
    return {
        "version": version_of(folder, "vllm"),
        "read": ["vllm/model_executor/models/registry.py", "vllm/model_executor/layers/quantization/__init__.py"],
        "architectures": sorted(served),
        "removed": removed,
        "transformers_backend": sorted(backend_classes(folder) - served),
        "quantization": sorted({element.value for element in methods.slice.elts} | VLLM_OVERRIDDEN),
        "read_ranks": VLLM_READ_RANKS.get(version_of(folder, "vllm"), ""),
    }


VLLM_READ_RANKS = {"0.33.0": "0.32"}
"""Versions whose classes were read and not run, with the compared version that has the same arrays per rank.

0.33: sharded_state_loader.py is the same file, and so are the classes of all families but gpt-oss and LFM2, which have
the same parameters; so have linear.py, vocab_parallel_embedding.py, fused_moe/, mamba/, models/transformers, and the
models of transformers 5.19 and 5.20 that the Transformers backend runs."""
VLLM_OVERRIDDEN = {"auto-round"}
"""Methods that configs name and that another of vLLM's methods takes over (`override_quantization_method`)."""


def sglang(folder):
    """The profile of SGLang: the classes that its modules of models enter, and its quantization package."""
    root, found = folder / "sglang/srt", set()
    for path in sorted((root / "models").rglob("*.py")):
        for name, value in assigned(parse(path)):
            if name == "EntryClass":
                entries = value.elts if isinstance(value, ast.List | ast.Tuple) else [value]
                found |= {entry.id for entry in entries if isinstance(entry, ast.Name)}
    methods = set()
    for node in ast.walk(parse(root / "layers/quantization/__init__.py")):
        if isinstance(node, ast.Dict):
            methods |= {
                key for key, value in zip(text_keys(node), node.values, strict=False) if isinstance(value, ast.Name)
            }
    return {
        "version": version_of(folder, "sglang"),
        "read": ["sglang/srt/models", "sglang/srt/layers/quantization/__init__.py"],
        "architectures": sorted(found),
        "transformers_backend": None,
        "quantization": sorted(methods),
    }


def transformers(folder):
    """The profile of transformers: the classes of its auto mappings, and the methods of its quantizers."""
    root, found = folder / "transformers", set()
    for path in sorted((root / "models").rglob("modeling_*.py")):
        tree = parse(path)
        exported = next((value for name, value in assigned(tree) if name == "__all__"), None)
        if exported is not None:
            names = {element.value for element in exported.elts if isinstance(element, ast.Constant)}
            classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)} & names
            found |= {name for name in classes if MODEL_CLASS.search(name) and not NOT_TORCH.search(name)}
    quantizers = next(
        value
        for name, value in assigned(parse(root / "quantizers/auto.py"))
        if name == "AUTO_QUANTIZATION_CONFIG_MAPPING"
    )
    return {
        "version": version_of(folder, "transformers"),
        "read": ["transformers/models/*/modeling_*.py", "transformers/quantizers/auto.py"],
        "architectures": sorted(found),
        "transformers_backend": [],
        # Configs say "bitsandbytes", and transformers appends the number of bits.
        "quantization": sorted({*text_keys(quantizers), "bitsandbytes"}),
    }


def tgi(folder):
    """The profile of text-generation-inference: the `model_type` of each of its models."""
    models = folder / "text_generation_server/models/__init__.py"
    types = set()
    for node in parse(models).body:
        if isinstance(node, ast.ClassDef) and node.name == "ModelType":
            for entry in node.body:
                if isinstance(entry, ast.Assign) and isinstance(entry.value, ast.Dict):
                    pairs = dict(zip(text_keys(entry.value), entry.value.values, strict=True))
                    types.add(pairs["type"].value)
    quantize = next(
        node
        for node in parse(folder / "text_generation_server/cli.py").body
        if isinstance(node, ast.ClassDef) and node.name == "Quantization"
    )
    methods = [node.value.value for node in quantize.body if isinstance(node, ast.Assign)]
    return {
        "read": ["server/text_generation_server/models/__init__.py", "server/text_generation_server/cli.py"],
        "model_types": sorted(types),
        "transformers_backend": None,
        "quantization": sorted(methods),
    }


def llama_cpp(folder):
    """The profile of llama.cpp's converter: the classes of its table of text models."""
    table = next(value for name, value in assigned(parse(folder / "__init__.py")) if name == "TEXT_MODEL_MAP")
    return {
        "read": ["conversion/__init__.py"],
        "architectures": sorted(text_keys(table)),
        "transformers_backend": [],
        "quantization": [],
    }


NOT_TORCH = re.compile(r"PreTrainedModel$|^(Flax|TF)[A-Z]")
"""Abstract classes, and those of other frameworks, which no config names."""
MODEL_CLASS = re.compile(r"(Model|Model[A-Z]?\w*Head\w*|For[A-Z]\w+|WithLMHead\w*)$")
"""Classes that a config's `architectures` may name, by the names that transformers gives them."""
_VLLM_HEADS = (
    *("auto-round", "auto_awq", "auto_gptq", "awq", "awq_marlin", "compressed-tensors", "gptq", "gptq_marlin", "inc"),
    *("modelopt", "modelopt_fp4", "modelopt_mixed", "modelopt_mxfp8", "moe_wna16"),
)
"""Methods whose `get_quant_method` answers for a `ParallelLMHead` (vllm/model_executor/layers/quantization)."""
_SGLANG_HEADS = (
    "auto-round",
    "gptq",
    "gptq_marlin",
    "modelopt",
    "modelopt_fp4",
    "modelopt_fp8",
    "modelopt_mixed",
    "moe_wna16",
)
"""The same of SGLang (sglang/srt/layers/quantization)."""
BEHAVIOR = {
    "vllm": {
        # AutoWeightsLoader raises for a name that no module has (vllm/model_executor/models/utils.py).
        "extra_tensors": "reject",
        "quantized_head": _VLLM_HEADS,
        "command": "vllm serve {path}",
        "degrees": {
            "tp": "--tensor-parallel-size {degree}",
            "pp": "--pipeline-parallel-size {degree}",
            "dp": "--data-parallel-size {degree}",
        },
        "expert_parallel": "--enable-expert-parallel",
        "tokenizer": "--tokenizer TOKENIZER",
        "sharded": "--load-format sharded_state",
    },
    "sglang": {
        # Most classes log and go on, and some raise KeyError (sglang/srt/models).
        "extra_tensors": "unknown",
        "quantized_head": _SGLANG_HEADS,
        "command": "python -m sglang.launch_server --model-path {path}",
        "degrees": {"tp": "--tp-size {degree}", "pp": "--pp-size {degree}", "dp": "--dp-size {degree}"},
        "expert_parallel": "--ep-size {degree}",
        "tokenizer": "--tokenizer-path TOKENIZER",
        "sharded": "--load-format sharded_state",
    },
    "transformers": {
        "extra_tensors": "ignore",
        "quantized_head": ["*"],
        "command": "python -c \"from transformers import {auto_class}; {auto_class}.from_pretrained('{path}')\"",
        "degrees": {},
        "expert_parallel": "",
        "tokenizer": "",
        "sharded": "",
    },
    "tgi": {
        "extra_tensors": "ignore",
        "quantized_head": ["gptq", "awq", "marlin"],
        "command": "text-generation-launcher --model-id {path}",
        "degrees": {"tp": "--num-shard {degree}"},
        "expert_parallel": "",
        "tokenizer": "--tokenizer-config-path TOKENIZER",
        "sharded": "",
    },
    "llama.cpp": {
        # convert_hf_to_gguf.py raises "Can not map tensor" (conversion/base.py).
        "extra_tensors": "reject",
        "quantized_head": [],
        "command": "python convert_hf_to_gguf.py {path}",
        "degrees": {},
        "expert_parallel": "",
        "tokenizer": "",
        "sharded": "",
    },
}
"""What no table in a consumer's source lists; each fact was read in the file that the comment names."""
READERS = {"vllm": vllm, "sglang": sglang, "transformers": transformers, "tgi": tgi, "llama.cpp": llama_cpp}


def main():
    """Write the profile of the consumer that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("consumer", choices=READERS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--version", default=None)
    given = parser.parse_args()
    profile = READERS[given.consumer](given.folder)
    version = given.version or profile["version"]
    state_names = given.consumer == "transformers" and not version.startswith("4.")
    older = given.consumer == "tgi" or version.startswith(
        "4."
    )  # server/requirements_cuda.txt of TGI has transformers 4.51.3
    behavior = {**BEHAVIOR[given.consumer], "state_names": state_names, "rope_parameters": not older}
    profile = {"consumer": given.consumer, **profile, **behavior, "version": version}
    short = ".".join(version.split(".")[: 3 if given.consumer == "sglang" else 2])  # SGLang has no 0.6 yet
    path = FOLDER / f"{given.consumer}-{short}.json"
    path.write_text(json.dumps(profile, indent=1) + "\n", encoding="utf-8")
    print(f"{path.name}: {len(profile.get('architectures', profile.get('model_types', [])))} architectures")


if __name__ == "__main__":
    main()
