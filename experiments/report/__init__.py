"""Reports of answers: tables, plots and pages."""
