"""Methods by name, those of other packages among them."""
