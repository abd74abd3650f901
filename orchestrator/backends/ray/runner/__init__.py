"""The actor that runs attempts: how it is created and called, and one attempt inside it."""
