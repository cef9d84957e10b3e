"""Run folders -> a table, a page, and pictures."""
