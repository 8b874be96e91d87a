"""A quantized model is described from its config alone nearly as its checkpoint has it."""

from __future__ import annotations

import pytest
from codes import CODECS, LLAMA

from shardctl.checkpoint.opening import open_checkpoint
from shardctl.options import SourceOptions

LEFT_OPEN = ("g_idx", "input_scale", "input_scale_ub")
"""Arrays that some writers leave out, and a config does not tell of."""
ONE = ((), (1,))
"""How writers spell the shape of one number."""


@pytest.mark.parametrize("name", CODECS)
def test_the_arrays_are_those_of_the_checkpoint(quantised, tmp_path, name):
    (tmp_path / "config.json").write_bytes((quantised(name) / "config.json").read_bytes())
    with (
        open_checkpoint(quantised(name)) as real,
        open_checkpoint(tmp_path, SourceOptions(described=True)) as described,
    ):
        there, here = real.manifest.tensors, described.manifest.tensors
        assert here.keys() <= there.keys()
        assert {n for n in there if n.rpartition(".")[2] not in LEFT_OPEN} == here.keys()
        for tensor in here.values():
            stored = there[tensor.name]
            assert tensor.shape == stored.shape or {tensor.shape, stored.shape} <= {*ONE}, tensor.name
        codes = [n for n in here if not n.endswith(("scale", "scale_inv", "scales"))]
        assert [here[n].dtype for n in codes] == [there[n].dtype for n in codes]


@pytest.mark.parametrize("name", ["awq", "gptq-4"])
def test_scales_have_the_type_of_the_model(quantised, tmp_path, name):
    (tmp_path / "config.json").write_bytes((quantised(name) / "config.json").read_bytes())
    with open_checkpoint(tmp_path, SourceOptions(described=True)) as described:
        scales = {t.dtype.torch for t in described.manifest.tensors.values() if t.name.endswith(".scales")}
    assert scales == {LLAMA["dtype"]}
