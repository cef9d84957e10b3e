"""Data pipeline: sources of documents, tokenizer, token store, windows and batches."""
