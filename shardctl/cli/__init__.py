"""The command line: one file per verb; parses, calls one function, renders, sets the exit code."""
