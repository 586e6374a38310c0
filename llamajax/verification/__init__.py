"""Whether a run's mesh and forms give one device's numbers, tried on emulated devices."""
