"""Says which version of shardctl this is."""

__version__ = "0.1.0"
