"""The algebra of arrays that libraries make of a model's tensors, in both directions from one expression."""
