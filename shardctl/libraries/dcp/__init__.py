"""`torch.distributed.checkpoint`: `.metadata` and the `.distcp` files of ranks."""
