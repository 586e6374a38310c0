"""The campaign of faults: a proof, to be run again on any machine, that a run loses nothing. `python -m tests.faults`.

Each group breaks tiny runs in one way, many times, and compares what becomes of them with runs that nobody touched: every
step's loss, and every array of the last checkpoint, to the bit. `child` is the program that is broken.
"""
