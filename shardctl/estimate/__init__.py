"""The estimator: what every device will hold in serving and in training, and what a mesh costs; from headers only."""
