"""The experiments of five papers, as data, and what runs them."""
