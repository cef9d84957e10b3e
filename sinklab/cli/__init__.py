"""The verbs, one thin file each. Nothing heavy is imported before a verb has been chosen."""
