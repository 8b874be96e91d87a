"""What tells a file that torch.save wrote before version 1.6, or with `_use_new_zipfile_serialization=False`."""

from typing import Final

MAGIC_NUMBER: Final = 0x1950A86A20F9469CFC6C
_SHORT_FORM: Final = b"\x8a\x0a" + MAGIC_NUMBER.to_bytes(10, "little") + b"."
MAGICS: Final = (
    b"\x80\x02" + _SHORT_FORM,
    b"\x80\x03" + _SHORT_FORM,
    b"\x80\x04\x95\x0d\0\0\0\0\0\0\0" + _SHORT_FORM,
    b"\x80\x05\x95\x0d\0\0\0\0\0\0\0" + _SHORT_FORM,
    b"L%dL\n." % MAGIC_NUMBER,
)
"""What such a file begins with: the magic number, pickled in each protocol (2, as a rule)."""
