"""The controller of a cluster: the loop, its recovery, and the Ray actor that runs it."""
