"""Opens a checkpoint: what its files hold, which model that is, and what each tensor is called."""
