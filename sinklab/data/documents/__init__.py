"""The name of a source -> its documents, one at a time, and which of them are held out."""
