"""Lists the words that options take which are no fixed choice, for shells that complete them; each list loads late."""

from typing import Final, Literal

USES: Final = ("serve", "train")
"""What devices may be for, when no server in particular is named."""
ESTIMATED_SERVERS: Final[tuple[Literal["vllm", "sglang"], ...]] = ("vllm", "sglang")
"""Servers whose way to count memory is known."""


def list_layout_names() -> list[str]:
    """List what `--to` takes."""
    from shardctl.libraries.catalogue import LAYOUT_FILES

    return list(LAYOUT_FILES)


def list_format_names() -> list[str]:
    """List what `--from` takes."""
    from shardctl.libraries.catalogue import FORMATS

    return [each.name for each in FORMATS]


def list_gpu_names() -> list[str]:
    """List what `--gpu` takes; a size such as 80GB is taken, too."""
    from shardctl.hardware.devices import format_short_name, list_devices

    return [*(format_short_name(one) for one in list_devices()), "auto"]


def list_recipe_names() -> list[str]:
    """List what `--quantize` takes."""
    from shardctl.models.rounding.recipes import RECIPES

    return list(RECIPES)


def list_optimizer_names() -> list[str]:
    """List what `--optimizer` takes."""
    from shardctl.estimate.training.optimizers import list_optimizers

    return [each.name for each in list_optimizers()]


def list_load_devices() -> list[str]:
    """List what `--load` takes; one device such as cuda:1 is taken, too."""
    return ["cpu", "cuda", "auto"]


def list_part_names() -> list[str]:
    """List what `--only` takes; a pattern of names is taken, too."""
    return ["text", "vision", "adapter", "mtp", "experts"]


def list_consumer_names() -> list[str]:
    """List what `--for` takes of `reshard` and `verify`; a version may be left out."""
    from shardctl.libraries.consumers.profile import list_consumers

    return [*dict.fromkeys(each.partition("@")[0] for each in list_consumers()), *list_consumers()]


def parse_consumer(text: str) -> str:
    """Refuse a consumer, or a version of one, that no profile describes."""
    from shardctl.libraries.consumers.profile import find_profile

    find_profile(text)
    return text


def parse_target(text: str) -> str:
    """Refuse a consumer that no profile describes; whether its version is known depends on the layout, too."""
    parse_consumer(text.partition("@")[0])
    return text


def list_uses() -> list[str]:
    """List what `--for` takes of `plan`."""
    return [*USES, *(each for each in list_consumer_names() if each.partition("@")[0] in ESTIMATED_SERVERS)]
