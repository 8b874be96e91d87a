"""GGUF, llama.cpp's format, whose headers alone are read."""
