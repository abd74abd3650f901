"""Label spaces: rules that turn leaf classes or samples into target ids."""
