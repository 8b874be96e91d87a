"""The estimator of what each device will hold."""
