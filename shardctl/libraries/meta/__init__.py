"""Reads and writes Llama as Meta publishes it: `consolidated.NN.pth` and `params.json`."""
