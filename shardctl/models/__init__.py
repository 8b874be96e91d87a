"""Model families as data: names, shapes, ties, and which mesh axis cuts which dim."""
