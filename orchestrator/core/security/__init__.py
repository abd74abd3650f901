"""What keeps secrets secret and foreign input harmless; imports nothing of the project but its errors."""
