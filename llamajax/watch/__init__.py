"""What a run measures, shows and keeps of itself."""
