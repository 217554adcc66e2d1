"""Measured comparisons. Each script runs us and the alternative side by side and prints both."""
