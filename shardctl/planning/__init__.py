"""What a plan says of an opened checkpoint: its workload, what every rank needs, what would have to change."""
