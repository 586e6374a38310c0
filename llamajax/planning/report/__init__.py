"""A plan as figures, text and a picture."""
