"""Has an engine load a checkpoint with its own loader, and compares what it then says with the source.

The programs `run_vllm.py` and `run_torch.py` import nothing of shardctl: they run in the Python that has the engine,
which may be another one, and exchange one JSON file each way with `asking.py`.
"""
