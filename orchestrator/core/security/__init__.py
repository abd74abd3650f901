"""Protection of secrets and against hostile input; imports nothing of the project except its errors."""
