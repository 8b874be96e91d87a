"""DeepSpeed: checkpoints of every ZeRO stage, and Universal Checkpoints."""
