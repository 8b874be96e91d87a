"""Reads checkpoints whose ranks each saved a part with torch.save, as DTensors or ShardedTensors."""
