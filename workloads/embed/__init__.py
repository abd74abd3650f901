"""Features of whole splits under a frozen backbone: the job ``embed`` and its artifact."""
