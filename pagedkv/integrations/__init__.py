"""Other people's tools over pages; each file needs its tool, and is imported by name only."""
