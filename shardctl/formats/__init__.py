"""The containers shardctl reads; an unknown or ambiguous directory is an error that says what was found."""
