"""How cut pieces are packed into files: one file per layout and one tuple that lists them."""
