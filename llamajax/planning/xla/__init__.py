"""XLA's side of a plan: the step compiled for another machine, and what the compiler tells of its program."""
