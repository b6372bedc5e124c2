"""How the bundled reference model is made: tokenizer, data, curriculum."""
