"""Who may write in a folder: one job at a time."""
