"""From a sweep to a graph of content-addressed jobs. Pure: no I/O, no clock."""
