"""Reports of runs: tables, figures, an HTML page, and verdicts on claims."""
