"""Reads files of torch.save without running their pickles."""
