"""The libraries whose files are read and written: a folder for each, and one list of them in `registry`."""
