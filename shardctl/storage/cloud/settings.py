"""Reads where stores are and how to connect to them from environment variables.

`object_store`, which obstore wraps, reads the variables `AWS_*`, `AZURE_*` and `GOOGLE_*` itself (its builders'
`from_env`); here is only what it does not conclude from them: that an endpoint which the user wrote as `http://` may be
spoken to without TLS, and Google's own variable for emulators.
"""

from __future__ import annotations

import json
import os
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shardctl.storage.endpoints import check_endpoint

if TYPE_CHECKING:
    from collections.abc import Iterator

QUICK: Final = {"max_retries": 2, "retry_timeout": timedelta(seconds=20)}
"""Within one try; further ones are ours, because only between ours a signal is heard."""
_ONE_REQUEST: Final = timedelta(minutes=5)
"""For all of one, body included: obstore's 30 s are too few for four parts on their way at less than 1.1 MB/s."""
_ENDPOINT_VARIABLES: Final = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
    "gs": ("STORAGE_EMULATOR_HOST", "GOOGLE_BASE_URL"),
}
"""The one that counts first."""
_GOOGLE_KEYS: Final = ("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH", "SERVICE_ACCOUNT")
"""Each with the path of a file; `gcs_base_url` in it is another endpoint."""
HOW_ALLOWED: Final = {
    "s3": "set the store's usual variables, such as AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION",
    "az": "set the store's usual variables, such as AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    "gs": "set the store's usual variables, such as GOOGLE_APPLICATION_CREDENTIALS",
}
"""What to do about missing credentials, by scheme."""


def build_store_options(scheme: str) -> dict[str, Any]:
    """Build the arguments for obstore's `from_url` that the environment asks for.

    Raises UsageError for an endpoint that is not the address of a server: obstore would panic in its first request.
    """
    client: dict[str, Any] = {"timeout": _ONE_REQUEST}
    endpoint = find_endpoint(scheme)
    if endpoint:
        check_endpoint(_find_endpoint_variable(scheme), endpoint)
    if endpoint.startswith("http://"):
        client["allow_http"] = True
    options: dict[str, Any] = {"client_options": client, "retry_config": QUICK}
    emulator = os.environ.get("STORAGE_EMULATOR_HOST", "") if scheme == "gs" else ""
    if emulator:
        # An emulator wants no credentials: docs of `GoogleCloudStorageBuilder::with_service_account_key`.
        key = {"gcs_base_url": _add_scheme(emulator), "disable_oauth": True}
        empty = dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
        options["config"] = {"service_account_key": json.dumps(key | empty)}
    return options


def find_endpoint(scheme: str) -> str:
    """Find the address that the user gave for the stores of a scheme; empty where it is the provider's own."""
    said = next(filter(None, (os.environ.get(name, "") for name in _ENDPOINT_VARIABLES[scheme])), "")
    if scheme == "gs":
        said = _add_scheme(said) if said else next(_list_google_endpoints(), "")
    return said.rstrip("/")


def _find_endpoint_variable(scheme: str) -> str:
    """Find what names the endpoint."""
    return next(
        (name for name in _ENDPOINT_VARIABLES[scheme] if os.environ.get(name)), "gcs_base_url of the service account"
    )


def _add_scheme(host: str) -> str:
    """Return an emulator's address; Google's libraries take `HOST:PORT` for one without TLS."""
    return host if "://" in host else f"http://{host}"


def _list_google_endpoints() -> Iterator[str]:
    """List the endpoints that the keys of service accounts name; what cannot be read is for the library to refuse."""
    for text in [_read_text_file(os.environ.get(name, "")) for name in _GOOGLE_KEYS] + [
        os.environ.get("GOOGLE_SERVICE_ACCOUNT_KEY", "")
    ]:
        try:
            found = json.loads(text).get("gcs_base_url")
        except (ValueError, AttributeError):
            continue
        if isinstance(found, str):
            yield found


def _read_text_file(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8") if path else ""
    except (OSError, ValueError):
        return ""
