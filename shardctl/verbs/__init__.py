"""What the program does, one verb a file; also the public Python API."""
