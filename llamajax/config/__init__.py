"""Every setting of a run and of the tools: a file per section, their bounds and rules, and how they are read."""
