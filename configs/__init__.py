"""Experiment configs: one file for each topic, one row for each ablation.

The source of a row says where its published numbers are printed. "Gu et al.", or "the paper", is "When Attention Sink
Emerges in Language Models". Its tables, figures and appendices have different numbers in arXiv 2410.10781v1 (v1) and
in the ICLR 2025 version (ICLR). Docstrings that name neither version mean v1. Values of figures were read by eye and
are not exact enough for comparisons.
"""
