"""Estimates, from headers only, what every device holds in serving and training, and what a mesh costs."""
