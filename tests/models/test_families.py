"""The tables say exactly what transformers builds, for every class of every fixture."""

from __future__ import annotations

import pytest
import transformers
from model_oracle import FAMILY, FIXTURES, classes, fixture, on_meta, state

from shardctl.errors import SourceError, UnsupportedError
from shardctl.models import FAMILIES, describe


@pytest.mark.parametrize(("name", "architecture"), classes())
def test_names_and_shapes_are_those_of_the_state_dict(name, architecture):
    config = fixture(name, architectures=[architecture])
    model = describe(config)
    ours = {n: t.shape for t in model.own() for n in (t.name, *t.ties)}
    theirs = state(on_meta(config))
    assert ours == theirs
    assert [t.name for t in model.own()] == [n for n in theirs if n not in model.aliases]
