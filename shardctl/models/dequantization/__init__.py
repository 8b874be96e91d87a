"""Takes quantized weights back to floating-point numbers, a tile at a time, as the libraries that own them do."""
