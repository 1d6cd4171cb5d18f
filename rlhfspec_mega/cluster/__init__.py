"""Worker groups keyed by role, behind one interface: local spawned processes here, other launchers beside it."""
