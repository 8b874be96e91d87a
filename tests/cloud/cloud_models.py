"""Checkpoints for buckets, and what a bucket holds."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from shardctl.models import describe_model

CONFIG = Path(__file__).parents[2] / "fixtures" / "configs" / "llama.json"


def llama(place, **changes):
    """A small Llama with random weights, a tokenizer and a file in a folder."""
    config = {**json.loads(CONFIG.read_text()), "dtype": "float32", **changes}
    random = np.random.default_rng(3)
    tensors = {t.name: random.standard_normal(t.shape, np.float32) for t in describe_model(config).own()}
    place.mkdir(parents=True)
    save_file(tensors, place / "model.safetensors", {"format": "pt"})
    (place / "config.json").write_text(json.dumps(config))
    (place / "tokenizer.json").write_text("{}")
    (place / "1_Pooling").mkdir()
    (place / "1_Pooling" / "config.json").write_text("{}")
    return place


def on_disk(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def held(s3, bucket, prefix=""):
    """Every object below a prefix, by key without it."""
    found = s3.list_objects_v2(Bucket=bucket, Prefix=prefix).get("Contents", ())
    return {o["Key"].removeprefix(prefix): s3.get_object(Bucket=bucket, Key=o["Key"])["Body"].read() for o in found}


def put(s3, bucket, prefix, folder):
    for path, content in on_disk(folder).items():
        s3.put_object(Bucket=bucket, Key=f"{prefix}{path}", Body=content)


def unfinished(s3, bucket):
    """Uploads in parts that are neither complete nor given up."""
    return [upload["Key"] for upload in s3.list_multipart_uploads(Bucket=bucket).get("Uploads", ())]
