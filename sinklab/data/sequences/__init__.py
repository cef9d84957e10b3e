"""A store, or the statistics of a text -> sequences of ids: windows, interventions, probes."""
