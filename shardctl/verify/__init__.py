"""The checks: structure from headers, content element by element."""
