"""Notifications: events that are sent to people over channels; at least once, always with the same id."""
