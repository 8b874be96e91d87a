"""Names of files with weights: what formats look for, what layouts write, and what others tell weights by.

Readers ask for these names while they scan; the catalogue imports all readers, so the names cannot come from there.
"""

from typing import Final

SAFETENSORS: Final = ".safetensors"
TORCH_SAVED: Final = (".bin", ".pt", ".pth")
"""Files of torch.save."""
DCP: Final = ".distcp"
DCP_METADATA: Final = ".metadata"
"""Which file of a distributed checkpoint of torch holds what (`torch/distributed/checkpoint/filesystem.py`)."""
LOADED_SUFFIXES: Final = (SAFETENSORS, *TORCH_SAVED)
"""Files that loaders take for weights by their names alone."""
WEIGHT_SUFFIXES: Final = (*LOADED_SUFFIXES, DCP)
"""Every file that holds weights, in a format that shardctl reads."""
INDEX_SUFFIX: Final = ".index.json"
"""Follows the name of the one file that the weights could be in."""
WHOLE_SAFETENSORS: Final = "model.safetensors"
WHOLE_TORCH: Final = "pytorch_model.bin"
PIPELINE: Final = "model_index.json"
"""Lists the parts of a pipeline of diffusers, each in a folder (diffusers, `DiffusionPipeline.config_name`)."""
PIPELINE_FORMAT: Final = "diffusers"
"""What `--from` calls such a pipeline; the names of its tensors begin with those of their folders."""
OPTIMIZER_FILES: Final = ("optimizer.bin", "optimizer.pt")
"""The first optimizer of accelerate (`utils/constants.py`), and that of Trainer, beside the weights."""
