"""Training of the bundled model: tokenizer, data, curriculum."""
