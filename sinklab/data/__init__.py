"""The name of a source -> the batches of a run: documents -> tokens -> store -> sequences, a room for each."""
