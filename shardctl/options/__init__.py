"""Declares every option once: its type, default, flag, help text and place in the help."""

from shardctl.options.destination_options import DestinationOptions
from shardctl.options.inspect_options import InspectOptions
from shardctl.options.plan_options import PlanOptions
from shardctl.options.reshard_options import ReshardOptions
from shardctl.options.source_options import SourceOptions
from shardctl.options.verify_options import VerifyOptions

__all__ = ["DestinationOptions", "InspectOptions", "PlanOptions", "ReshardOptions", "SourceOptions", "VerifyOptions"]
