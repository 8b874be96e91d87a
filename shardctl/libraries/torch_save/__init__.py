"""Files of torch.save, whose pickles are read without being run."""
