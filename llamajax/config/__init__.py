"""Settings of a run and of the tools: one file per section, with bounds and rules, and the code that reads them."""
