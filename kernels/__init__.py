"""Array programs below the methods: each has a plain reference beside it."""
