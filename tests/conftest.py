"""What all tests share."""

import signal

from hypothesis import settings

settings.register_profile("shardctl", deadline=None)  # a busy machine is not a failure
settings.load_profile("shardctl")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell's background job ignores Ctrl-C, and so would every program that a test starts and interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
