"""Plans and runs conversions, from options to a copy plan, its shares, its record and its destination."""
