"""Reads and writes checkpoints of `torch.distributed.checkpoint`: `.metadata` and `.distcp` files."""
