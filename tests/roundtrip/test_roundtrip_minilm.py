"""A real model, 1 -> tp2 x pp2 -> 1: the bits, the digest and the sentence embeddings are those of the original."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
import torch
from tiny_models import assert_same, side_files, stored
from transformers import AutoModel, AutoTokenizer

from shardctl.options import ReshardOptions, VerifyOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.diff import diff
from shardctl.verbs.digest import digest
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

if TYPE_CHECKING:
    from pathlib import Path

SENTENCES = [
    "A checkpoint was split over four devices.",
    "Four GPUs each hold a part of the model.",
    "Der Apfel fällt nicht weit vom Stamm.",
    "x",
]


def embed(path: Path) -> torch.Tensor:
    """Mean-pooled, normalised token embeddings, as the model's card defines its sentence embeddings."""
    tokens = AutoTokenizer.from_pretrained(path)(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = AutoModel.from_pretrained(path).eval()(**tokens).last_hidden_state
    mask = tokens["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1))


@pytest.fixture(scope="module")
def steps(minilm, tmp_path_factory):
    """The original, its four ranks, and what comes back."""
    base = tmp_path_factory.mktemp("minilm")
    source = base / "source"
    shutil.copytree(minilm, source, ignore=shutil.ignore_patterns("__pycache__"))
    reshard(source, base / "ranks", ReshardOptions(mesh=Mesh.of(tp=2, pp=2)))
    reshard(base / "ranks", base / "back", ReshardOptions(to="hf"))
    return source, base / "ranks", base / "back"


def test_every_tensor_is_bit_identical(steps):
    source, _, back = steps
    assert len(stored(source)) > 100
    assert_same(stored(back), stored(source))


def test_the_digest_is_the_same_at_every_step(steps):
    assert len({digest(step).digest for step in steps}) == 1


def test_there_are_four_ranks_and_none_holds_half_the_model(steps):
    source, ranks, _ = steps
    sizes = [file.stat().st_size for file in ranks.glob("shard-*.safetensors")]
    assert len(sizes) == 4
    assert max(sizes) < 0.5 * (source / "model.safetensors").stat().st_size


def test_side_files_travel_along_byte_for_byte(steps):
    source, ranks, back = steps
    assert "1_Pooling/config.json" in side_files(source)
    assert side_files(source) == side_files(ranks) == side_files(back)


def test_verify_and_diff_agree_at_every_step(steps):
    source, ranks, back = steps
    assert verify(ranks, VerifyOptions(level="full", against=source)).ok
    assert verify(back, VerifyOptions(level="full", against=ranks)).ok
    assert not diff(source, ranks).changes
    assert diff(ranks, back).equal == len(stored(source))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_sentence_embeddings_are_equal(steps):
    original, ranks, back = map(embed, steps)
    assert torch.equal(back, original)
    assert torch.equal(ranks, original), "transformers loads the rank files as they are"
    similar = original @ original.T
    assert similar[0, 1] > similar[0, 2], "these are sentence embeddings indeed"


def test_sentence_transformers_runs_what_came_back(steps):
    library = pytest.importorskip("sentence_transformers")
    source, _, back = steps
    ours, theirs = (library.SentenceTransformer(str(p), device="cpu").encode(SENTENCES) for p in (back, source))
    assert (ours == theirs).all()
