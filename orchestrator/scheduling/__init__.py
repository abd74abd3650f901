"""Which attempts start, wait, move or end, given the state of all sweeps and the cluster. Pure: no I/O, no clock."""
