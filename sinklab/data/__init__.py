"""Documents -> tokens -> windows -> batches."""
