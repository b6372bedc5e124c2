"""What contexts can bear: measured, fitted, written and shown."""
