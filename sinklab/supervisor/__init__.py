"""Supervision of the processes of a run: start, heartbeats, failures and restarts."""
