"""Works out weights that adapters have changed, part by part and in bounded memory."""
