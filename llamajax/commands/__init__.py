"""The verbs of `llamajax`: their table, and their completion in shells."""
