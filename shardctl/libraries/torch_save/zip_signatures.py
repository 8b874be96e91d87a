"""The records of a zip archive, for those who read and those who write them (PKWARE APPNOTE 6.3.9, section 4.3)."""

import struct
from typing import Final

LOCAL_MAGIC: Final = b"PK\x03\x04"
"""What a record's own header begins with, and so a non-empty archive."""
LOCAL: Final = struct.Struct("<4s5H3I2H")
CENTRAL_MAGIC: Final = b"PK\x01\x02"
CENTRAL: Final = struct.Struct("<4s6H3I5H2I")
"""A record's entry in the directory."""
END_MAGIC: Final = b"PK\x05\x06"
END: Final = struct.Struct("<4s4H2IH")
END64_MAGIC: Final = b"PK\x06\x06"
END64: Final = struct.Struct("<4sQ2H2I4Q")
LOCATOR_MAGIC: Final = b"PK\x06\x07"
LOCATOR: Final = struct.Struct("<4sIQI")
"""Where the zip64 end record is."""
FULL2: Final = 0xFFFF
FULL4: Final = 0xFFFFFFFF
"""Both stand for "see the zip64 field"."""
