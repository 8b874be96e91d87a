"""Does the work of the program, one verb per file; also the public Python API."""
