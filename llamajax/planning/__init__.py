"""What a run needs and how fast it is, before it runs: the very program, compiled for the cluster without having one."""
