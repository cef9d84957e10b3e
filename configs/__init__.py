"""What is run: one file for each table of the paper, one row for each ablation.

Sources say where a number stands. "Gu et al." is "When Attention Sink Emerges in Language Models", which numbers its
tables, figures and appendices differently as arXiv 2410.10781v1 (v1) and as printed for ICLR 2025 (ICLR); docstrings
mean v1 where they say neither. What is said of a figure has been read off it by eye: it is no number to compare with.
"""
