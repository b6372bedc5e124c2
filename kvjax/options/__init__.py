"""Budgets, schedules, and checks of options."""
