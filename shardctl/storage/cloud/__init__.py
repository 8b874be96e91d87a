"""Reads buckets (`s3://`, `gs://`, `az://`) by ranges and writes them object by object, through obstore."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeGuard

if TYPE_CHECKING:
    from shardctl.storage.cloud.source import CloudSource

SCHEMES: Final = ("s3", "gs", "az")


def is_bucket(text: object) -> TypeGuard[str]:
    """Return whether a place is written as one in a bucket."""
    return isinstance(text, str) and text.partition("://")[0] in SCHEMES and "://" in text


def open_cloud(text: str) -> CloudSource:
    """Return the checkpoint at an address; imports what that needs.

    Raises UsageError for an address that is none or without obstore, SourceError for what does not exist.
    """
    from shardctl.storage.cloud.bucket import CloudBucket
    from shardctl.storage.cloud.source import CloudSource

    return CloudSource(CloudBucket(text))
