"""Checkpoints of which each rank saved its own part with torch.save, as DTensors or ShardedTensors."""
