"""What trials of a search tell while they train."""
