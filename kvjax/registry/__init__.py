"""Methods by name, including those of other packages."""
