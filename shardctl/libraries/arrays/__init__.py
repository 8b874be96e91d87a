"""Maps a model's tensors to another library's arrays and back, from one expression."""
