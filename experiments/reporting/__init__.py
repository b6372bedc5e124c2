"""What answers come to, shown: tables, plots and pages."""
