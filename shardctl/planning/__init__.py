"""Plans for an opened checkpoint: its workload, what every rank needs, and what would have to change."""
