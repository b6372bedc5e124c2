"""Names with options, budgets and schedules."""
