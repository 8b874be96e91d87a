"""A conversion as it is planned and run: from options to a copy plan, its parts, its record, and its place."""
