"""The actor that runs attempts: how it is made, what it obeys, and one attempt inside it."""
