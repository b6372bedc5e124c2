"""Models in single GGUF files, as llama.cpp writes them."""
