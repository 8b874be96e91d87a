"""What readers of every library need to know of a directory: indexes, links, side files, impostors."""
