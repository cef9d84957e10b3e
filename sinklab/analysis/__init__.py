"""Analysis of trained models: captured arrays, metrics, and lm-evaluation-harness."""
