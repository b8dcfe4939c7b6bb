"""Each rank ends over a file whose name is no UTF-8, as a data set from elsewhere may hold it."""

import os

raise ValueError(f"bad image {os.fsdecode(bytes([0x63, 0xFF, 0x2E]))}jpg")
