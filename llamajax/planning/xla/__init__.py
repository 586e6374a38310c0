"""XLA's side of a plan: the step compiled for another machine, and the compiler's figures of the program."""
