"""Features of whole splits under a frozen backbone: the network, and the artifact that an ``embed`` job writes."""
