"""Worker processes in groups by role, behind one interface, with a launcher for one machine and one for Ray."""
