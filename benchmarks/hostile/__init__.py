"""How long the neighbour waits while a server is attacked."""
