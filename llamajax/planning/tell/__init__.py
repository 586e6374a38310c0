"""What a plan says: in figures, as text, as a page with drawings."""
