"""Optimizer states of a library's arrays become states of the tensors in them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shardctl.base.dtype import BY_NAME
from shardctl.base.errors import UnsupportedError
from shardctl.libraries.registry import scan_checkpoint
from shardctl.libraries.schemas import bind_checkpoint
from shardctl.models import describe_model
from shardctl.storage import read_bytes
from shardctl.storage.local import LocalSource
from shardctl.tensors.box import Box
from shardctl.tensors.manifest import Chunk, ConstantFill, Tensor, TrainingState

OWNER = Path(__file__).parents[2] / "fixtures" / "vllm" / "llama" / "0.25-tp2"
ARRAY = "model.layers.0.self_attn.qkv_proj.weight"


def bind_with_state(shape: tuple[int, ...]):
    """Bind the arrays of two ranks, each with a state `step` of this shape for one of them."""
    source, states = LocalSource(OWNER), {}
    for rank in range(2):
        name = f"optimizer.step.rank{rank}/{ARRAY}"
        chunk = Chunk(Box.whole(shape), BY_NAME["F32"], ConstantFill(b"\0\0\x80?"), name)
        states[name] = Tensor(name, BY_NAME["F32"], shape, (chunk,))
    stored = replace(scan_checkpoint(source), training=TrainingState(states=states))
    model = describe_model(json.loads((OWNER / "config.json").read_text()))
    return bind_checkpoint(model, stored, lambda file, start, size: read_bytes(source, file, start, size))


def test_the_step_of_an_array_is_that_of_every_tensor_in_it():
    states = bind_with_state(()).training.states
    assert list(states) == [f"optimizer.step.model.layers.0.self_attn.{name}_proj.weight" for name in "qkv"]
    assert all(state.shape == () and len(state.chunks) == 2 for state in states.values())


def test_a_state_of_another_shape_is_refused():
    with pytest.raises(UnsupportedError, match=r"has shape \[7\], unlike its parameter"):
        bind_with_state((7,))
