"""Notifications: which events people hear of, on which channels, exactly once per channel."""
