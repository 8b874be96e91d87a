"""What all tests share."""

from hypothesis import settings

settings.register_profile("shardctl", deadline=None)  # a busy machine is not a failure
settings.load_profile("shardctl")
