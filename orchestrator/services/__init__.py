"""What the command line and the Python interface offer: previews, explanations, reproduction, power of a design."""
