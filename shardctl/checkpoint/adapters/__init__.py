"""Opens adapters, and merges them into their base."""
