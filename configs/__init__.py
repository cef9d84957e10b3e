"""What is run: one file for each table of the paper, one row for each ablation."""
