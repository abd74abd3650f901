"""What answers the questions of the control plane, in processes of their own; see ``orchestrator.core.data_plane``."""
