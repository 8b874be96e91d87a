"""What a training run takes: days and money follow from the time of one step and the tokens of the cluster."""

from pathlib import Path

import shardctl

CONFIG = Path(__file__).parents[2] / "fixtures/configs_public/llama-3.1-8b.json"
HIDDEN, LAYERS, INNER, VOCABULARY, KEYS, LENGTH = 4096, 32, 14336, 128256, 1024, 8192
PEAK_FLOPS = 989.4e12
"""Of an H100 with dense bf16, by its data sheet."""


def test_days_price_and_mfu_are_those_of_arithmetic():
    options = {"for_": "train", "mesh": "fsdp=8", "gpu": "h100", "seq_len": LENGTH}
    planned = shardctl.plan(CONFIG, tokens="1T", price="2.50", **options)
    cost, text = planned.to_dict()["cost"], str(planned)
    rate = cost["tokens"] / cost["seconds"]
    days = 10**12 / rate / 86400
    assert f"{days:,.1f} days" in text
    assert f"{days * 24 * 8 * 2.5:,.0f}" in text
    matrices = LAYERS * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * KEYS + 3 * HIDDEN * INNER) + HIDDEN * VOCABULARY
    whole = 6 * matrices + 12 * LAYERS * HIDDEN * LENGTH  # attention over all tokens; half of them where it is causal
    causal = 6 * matrices + 6 * LAYERS * HIDDEN * LENGTH
    used = cost["model_flops_utilization"] * 8 * PEAK_FLOPS / rate
    assert causal * 0.98 < used < whole * 1.02
