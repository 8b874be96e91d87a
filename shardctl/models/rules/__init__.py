"""Makes models of rule files and of an installed transformers, for architectures without a table."""
