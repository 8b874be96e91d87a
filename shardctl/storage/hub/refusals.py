"""Translates the Hub's refusals into errors that say what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardctl.base.errors import AccessError, ShardctlError, SourceError, TransientError

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

    from shardctl.storage.hub.address import HubAddress

_LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"


def build_refusal_error(error: HfHubHTTPError, address: HubAddress, path: str = "") -> ShardctlError:  # noqa: PLR0911 - one a kind
    """Build the error to raise for a status of the Hub that trying again will not change.

    For what is missing and what is private to others the Hub gives the same answer, so that the two cannot be told
    apart; what is gated it says (huggingface_hub, `utils/_http.py`, `hf_raise_for_status`).
    """
    from huggingface_hub import constants, errors

    name = address.repository
    status = error.response.status_code
    if isinstance(error, errors.GatedRepoError):
        return AccessError(
            f"{name} is gated, and you have not been given access (HTTP {status})",
            hint=f"accept its terms at {_strip_credentials(constants.ENDPOINT)}/{name}, then {_LOG_IN}",
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return SourceError(
            f"{name} is neither a path here nor a model on the Hub that you may see (HTTP {status})",
            hint=f"is the name right? If the model is private, {_LOG_IN}",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return SourceError(
            f"{name} has no revision {address.revision!r}",
            hint=f"{_strip_credentials(constants.ENDPOINT)}/{name}/tree/main lists its branches and tags",
        )
    if isinstance(error, errors.EntryNotFoundError):
        return SourceError(f"{path or address.inside} is missing in {name} on the Hub")
    if isinstance(error, errors.DisabledRepoError):
        return AccessError(f"{name} was disabled by the Hub and cannot be downloaded")
    if status in {401, 403}:
        return AccessError(
            f"the Hub refuses {name} (HTTP {status}): {error.server_message or 'the token does not allow it'}",
            hint=f"check that the token is valid and may read the repository; {_LOG_IN}",
        )
    return SourceError(
        f"the Hub answers {_describe_request(path, name)} with HTTP {status} {error.response.reason_phrase}"
    )


def build_offline_error(address: HubAddress, what: str) -> ShardctlError:
    """Build the error for something that is only on the Hub while HF_HUB_OFFLINE is set."""
    return SourceError(
        f"{address.repository} {what}, and HF_HUB_OFFLINE is set",
        hint=f"unset HF_HUB_OFFLINE, or fetch it while online: hf download {address.repository}",
    )


def build_unreachable_error(error: Exception, address: HubAddress) -> ShardctlError:
    """Build the error for a Hub that does not answer."""
    from huggingface_hub import constants

    endpoint = _strip_credentials(constants.ENDPOINT)
    name = (
        f"{address.repository} is not a path here, and"
        if address.bare
        else f"the Hub is needed for {address.repository}, but"
    )
    return TransientError(
        f"{name} {endpoint} cannot be reached: {error}",
        hint="check the connection and HF_ENDPOINT; with HF_HUB_OFFLINE=1 only the Hub's cache is read",
    )


def _strip_credentials(endpoint: str) -> str:
    """Return an address without the name and password that it may have.

    >>> _strip_credentials("https://me:secret@mirror/hub"), _strip_credentials("https://huggingface.co")
    ('https://mirror/hub', 'https://huggingface.co')
    """
    scheme, separator, rest = endpoint.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{separator}{host.rpartition('@')[2]}{slash}{path}"


def _describe_request(path: str, name: str) -> str:
    return f"a request for {path} of {name}" if path else f"a request for {name}"
